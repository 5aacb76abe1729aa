"""What calls cost on this machine, measured between two ranks that are threads of this process, over Gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from bagua.advise.facts import MachineFacts
from bagua.comm import Communicator, Membership, create_transport, thread_store

__all__ = ["probe_machine"]

_SMALL, _LARGE = 64, 2 * 1024 * 1024
_ROUNDS = 40
_TIMEOUT_S = 120.0


def probe_machine(cores: int | None = None) -> MachineFacts:
    """Measure what messages cost on the loopback device.

    Args:
        cores: processor cores of a host; None for those that this process may use.

    Raises:
        TransportUnavailableError: Gloo cannot connect anything on this machine.
    """
    store = thread_store()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(_rank, store, rank) for rank in range(2)]
    small_s, large_s = ranks[0].result()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    copied = torch.empty(_LARGE // 4)
    source = torch.ones_like(copied)
    local_s = _least_s(lambda: copied.copy_(source))
    return MachineFacts(
        message_s=small_s / 3,  # an allreduce of two ranks is three rounds
        byte_s=max(large_s - small_s, 0.0) / _LARGE,
        local_message_s=min(20e-6, small_s / 3),
        local_byte_s=local_s / _LARGE,
        cores=cores or usable,
    )


def _rank(store: object, rank: int) -> tuple[float, float]:
    """Seconds of a small and of a large allreduce."""
    membership = Membership(store, rank, (0, 1), (0, 1), _TIMEOUT_S, "probe")  # type: ignore[arg-type]
    communicator = Communicator(create_transport("gloo", membership), _TIMEOUT_S)
    try:
        small, large = (torch.zeros(nbytes // 4) for nbytes in (_SMALL, _LARGE))
        return _least_s(lambda: communicator.allreduce(small)), _least_s(lambda: communicator.allreduce(large))
    finally:
        communicator.close()


def _least_s(act: Callable[[], object]) -> float:
    """Seconds of ``act``: what else goes on in the machine only adds to them."""
    times = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        act()
        times.append(time.perf_counter() - begun)
    return min(times)
