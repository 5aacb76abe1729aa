"""What calls cost on this machine, measured between two ranks over Gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from bagua.advise.facts import CallFacts, MachineFacts
from bagua.advise.network import messages_of
from bagua.advise.trace import Message
from bagua.comm import Communicator, Membership, create_transport, thread_store

__all__ = ["call_facts", "machine_facts", "probe_machine"]

#: Bytes of a small call, and of those that show what bytes cost: within a core's cache, and beyond it.
_SMALL, _LARGE = 64, (256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
#: Calls of each kind and size.
_ROUNDS, _ROUNDS_OF_SMALL = 24, 200
#: Not the median: what else goes on in the machine only adds to a call. Not the least: that is luck.
_QUANTILE = 0.1
_TIMEOUT_S = 120.0


def probe_machine(cores: int | None = None) -> MachineFacts:
    """Measure what messages cost on the loopback device, between two threads of this process.

    Args:
        cores: processor cores of a host; None for those that this process may use.

    Raises:
        TransportUnavailableError: Gloo cannot connect anything on this machine.
    """
    store = thread_store()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_rank, store, rank) for rank in range(2)]
    return machine_facts(ranks[0].result(), cores)


def machine_facts(calls: tuple[CallFacts, ...], cores: int | None = None) -> MachineFacts:
    """Facts of this machine.

    Args:
        calls: calls that two ranks have measured.
        cores: processor cores of a host; None for those that this process may use.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    large = _LARGE[1]
    copied = torch.empty(large // 4)
    source = torch.ones_like(copied)
    local_s = _usual_s(lambda: copied.copy_(source))
    message_s, byte_s = calls[0].message_s, calls[0].byte_s(large)
    return MachineFacts(message_s, byte_s, min(20e-6, message_s), local_s / large, cores or usable, calls)


def _rank(store: object, rank: int) -> tuple[CallFacts, ...]:
    membership = Membership(store, rank, (0, 1), (0, 1), _TIMEOUT_S, "probe")  # type: ignore[arg-type]
    communicator = Communicator(create_transport("gloo", membership), _TIMEOUT_S)
    try:
        return call_facts(communicator)
    finally:
        communicator.close()


def call_facts(communicator: Communicator) -> tuple[CallFacts, ...]:
    """Measure calls between the two ranks of ``communicator``, both of which call this."""
    seconds = {nbytes: dict(_seconds_by_kind(communicator, nbytes)) for nbytes in (_SMALL, *_LARGE)}
    found = []
    for kind, small_s in seconds[_SMALL].items():
        # Of two ranks, each sends half of what is gathered or exchanged.
        share = 0.5 if kind in ("allgather", "alltoall") else 1.0
        points = tuple((share * nbytes, max(seconds[nbytes][kind] - small_s, 0.0)) for nbytes in _LARGE)
        found.append(CallFacts(kind, small_s / messages_of(Message(kind, _SMALL, 2, 2)), points))
    return tuple(found)


def _seconds_by_kind(communicator: Communicator, nbytes: int) -> Iterator[tuple[str, float]]:
    """Kinds of calls, the first of which stands for those that are not here, and seconds of one of ``nbytes``."""
    given, taken = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    half, other = torch.zeros(nbytes // 8), 1 - communicator.rank
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: communicator.allreduce(given),
        "allgather": lambda: communicator.allgather(taken, half),
        "alltoall": lambda: communicator.alltoall(taken, given),
        "sendrecv": lambda: communicator.sendrecv(taken, given, other, other),
    }
    for kind, call in calls.items():
        yield kind, _usual_s(call, _ROUNDS_OF_SMALL if nbytes == _SMALL else _ROUNDS)


def _usual_s(act: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """Seconds of ``act`` where little else goes on in the machine."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun)
    return sorted(times)[int(_QUANTILE * rounds)]
