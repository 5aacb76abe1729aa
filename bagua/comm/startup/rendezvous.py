"""How ranks find each other: a store, who has come, and what each of them brought."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua import env
from bagua.comm.lifetime.forks import family, leak
from bagua.comm.store.keys import read_all, wait_for_keys
from bagua.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    PeerLostError,
    TransportUnavailableError,
)

__all__ = ["connect", "consult", "exchange", "raise_refusals", "refuse_together", "resolve_rank"]

_COMMAND = "baguarun --nproc 2 train.py (or: torchrun --nproc_per_node 2 train.py)"


class _Hosted:
    """Stores that this process hosts for a job without an agent. They end with the process.

    After ``destroy_process_group`` faster ranks may be back already, and must not meet at
    a store that is about to close.
    """

    def __init__(self) -> None:
        #: By process and port.
        self.stores: dict[tuple[int, str], dist.Store] = {}
        family.add(self)

    def disown(self) -> None:
        """In a forked child: the thread that serves them is the parent's."""
        leak(list(self.stores.values()))


_hosted = _Hosted()


def resolve_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Rank and world size from the arguments, else from the launcher, else a single process.

    Raises:
        ConfigurationError: they are incomplete or contradict each other.
    """
    rank = rank if rank >= 0 else _or(env.get_rank(), -1)
    world_size = world_size if world_size >= 0 else _or(env.get_world_size(), -1)
    if rank < 0 and world_size in (-1, 1):
        return 0, 1
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigurationError(
            "this process does not know its place in the world",
            argument="rank, world_size",
            expected="0 <= rank < world_size, from the arguments or from a launcher",
            seen=f"rank {'unset' if rank < 0 else rank}, world size {'unset' if world_size < 0 else world_size}",
            advice=f"Start the script with: {_COMMAND}",
        )
    return rank, world_size


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def connect(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store of this job, as the launcher's variables describe it.

    Raises:
        ConfigurationError: several processes but no address to meet at.
        CollectiveTimeoutError: the process that hosts the store does not answer.
    """
    if world_size == 1:
        return dist.HashStore()
    found = env.launcher_variables()
    address, port = found.get("MASTER_ADDR"), found.get("MASTER_PORT", "")
    if address is None or not port.isdigit():
        raise ConfigurationError(
            f"a world of {world_size} processes, but no address where they meet",
            argument="MASTER_ADDR, MASTER_PORT",
            expected="both in the environment, as a launcher sets them",
            seen=f"MASTER_ADDR {address or 'unset'}, MASTER_PORT {port or 'unset'}",
            advice=f"Start the script with: {_COMMAND}",
        )
    agent_hosts = found.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not agent_hosts:
        store = _hosted.stores[os.getpid(), port] = _host_store(address, int(port), world_size, timeout_s)
    else:
        store = _join_store(address, int(port), rank, world_size, timeout_s, by_agent=agent_hosts)
    # A restarted job must not read what the failed attempt left in the agent's store.
    return dist.PrefixStore(f"attempt{found.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _host_store(address: str, port: int, world_size: int, timeout_s: float) -> dist.Store:
    try:
        return dist.TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"rank 0 cannot open the store where all ranks meet: {error}",
            argument="MASTER_ADDR, MASTER_PORT",
            expected="an address of this host, and a free port",
            seen=f"{address}:{port}",
        ) from error


def _join_store(address: str, port: int, rank: int, world_size: int, timeout_s: float, *, by_agent: bool) -> dist.Store:
    started = time.monotonic()
    try:
        left_s = _wait_for_listener(address, port, timeout_s)
        return dist.TCPStore(
            address, port, world_size, is_master=False, timeout=timedelta(seconds=left_s), wait_for_workers=False
        )
    except (OSError, RuntimeError) as error:
        host = "the launcher's agent" if by_agent else "rank 0"
        raise CollectiveTimeoutError(
            f"rank {rank} could not reach the store of {host} at {address}:{port}",
            rank=rank,
            call="init_process_group",
            peers=() if by_agent else (0,),
            elapsed_s=time.monotonic() - started,
            timeout_s=timeout_s,
            advice="Check that it runs, and that MASTER_ADDR and MASTER_PORT are right on every host.",
        ) from error


def _wait_for_listener(address: str, port: int, timeout_s: float) -> float:
    """Wait until somebody listens there; the seconds that are left.

    TCPStore would do the same, but goes on for long after its timeout, and prints a stack trace for each attempt.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(min(left_s, 5.0), 0.05)).close()
            return max(deadline - time.monotonic(), 1.0)
        except OSError:
            if left_s <= 0:
                raise
        time.sleep(min(pause_s, max(left_s, 0.0)))
        pause_s = min(2 * pause_s, 0.5)


def exchange(store: dist.Store, topic: str, rank: int, ranks: Sequence[int], value: Any, timeout_s: float) -> list[Any]:
    """What every member posted under ``topic``, in rank order. A barrier that names who is missing.

    Args:
        store: of the group.
        topic: used once per store.
        rank: this member's rank in the group.
        ranks: what messages call the members.
        value: anything JSON can hold.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        CollectiveTimeoutError: with the missing ranks as ``peers``.
    """
    keys = [f"{topic}/{member}" for member in range(len(ranks))]
    started = time.monotonic()
    try:
        store.set(keys[rank], json.dumps(value))
        _collect(store, topic, rank, ranks, keys, started, timeout_s)
        return [json.loads(text) for text in read_all(store, keys)]
    except dist.DistNetworkError as error:
        raise _store_lost(topic, rank, ranks) from error


def consult(
    store: dist.Store,
    topic: str,
    number: int,
    rank: int,
    ranks: Sequence[int],
    value: Any,
    decide: Callable[[list[Any]], Any],
    timeout_s: float,
) -> Any:
    """What the group's rank 0 decides from the values that all members post.

    Args:
        store: of the group.
        topic: what it is about.
        number: 1 the first time, then one more each time; what the time before left in the store is deleted.
        rank: this member's rank in the group.
        ranks: what messages call the members.
        value: anything JSON can hold.
        decide: called on rank 0 with the values in rank order; returns anything JSON can hold.
            It must not raise: the others would wait for an answer.
        timeout_s: how long to wait for the others, in seconds.

    Raises:
        CollectiveTimeoutError: with the missing ranks as ``peers``.
    """
    keys = [f"{topic}{number}/{member}" for member in range(len(ranks))]
    answer = f"{topic}{number}/answer"
    started = time.monotonic()
    try:
        store.set(keys[rank], json.dumps(value))
        if rank == 0:
            _collect(store, topic, rank, ranks, keys, started, timeout_s)
            for member in (*range(len(ranks)), "answer") if number > 1 else ():
                store.delete_key(f"{topic}{number - 1}/{member}")  # Who is here has read that.
            store.set(answer, json.dumps(decide([json.loads(text) for text in read_all(store, keys)])))
        elif not wait_for_keys(store, [answer], started + timeout_s):
            _collect(store, topic, rank, ranks, keys, started, timeout_s)
            raise _not_come(topic, rank, ranks, [ranks[0]], started, timeout_s)
        return json.loads(store.get(answer))
    except dist.DistNetworkError as error:
        raise _store_lost(topic, rank, ranks) from error


def _collect(
    store: dist.Store, topic: str, rank: int, ranks: Sequence[int], keys: list[str], started: float, timeout_s: float
) -> None:
    """Wait until every member's key is there."""
    if not wait_for_keys(store, keys, started + timeout_s):
        missing = [ranks[i] for i, key in enumerate(keys) if not store.check([key])]
        raise _not_come(topic, rank, ranks, missing, started, timeout_s)


def _not_come(
    topic: str, rank: int, ranks: Sequence[int], missing: list[int], started: float, timeout_s: float
) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        f"{len(missing)} of {len(ranks)} ranks did not come",
        rank=ranks[rank],
        call=topic,
        peers=missing,
        elapsed_s=time.monotonic() - started,
        timeout_s=timeout_s,
        advice="Look at the output of those ranks first; did they start at all?",
    )


def _store_lost(topic: str, rank: int, ranks: Sequence[int]) -> PeerLostError:
    return PeerLostError(
        f"rank {ranks[rank]} lost the store through which the ranks meet",
        rank=ranks[rank],
        call=topic,
        peers=ranks[:1],
        advice="It is hosted by rank 0 or by the launcher: look at its output first.",
    )


def refuse_together(
    store: dist.Store,
    topic: str,
    rank: int,
    ranks: Sequence[int],
    refusal: Exception | None,
    timeout_s: float,
) -> None:
    """Raise on every member if one of them has a reason not to go on.

    Raises:
        TransportUnavailableError: naming the ranks that refuse and why.
    """
    answers = exchange(store, topic, rank, ranks, str(refusal) if refusal else "", timeout_s)
    raise_refusals(answers, rank, ranks, refusal)


def raise_refusals(reasons: Sequence[str], rank: int, ranks: Sequence[int], refusal: Exception | None) -> None:
    """Raise if a member has a reason not to go on.

    Args:
        reasons: reason of each member, empty where there is none.
        rank: this member's rank in the group.
        ranks: what messages call the members.
        refusal: error of this member, behind its own reason.

    Raises:
        TransportUnavailableError: naming the ranks that refuse and why.
    """
    if refusal is not None:
        raise refusal
    refusing = [(ranks[member], reason) for member, reason in enumerate(reasons) if reason]
    if refusing:
        raise TransportUnavailableError(
            "; ".join(f"rank {member} refused: {reason}" for member, reason in refusing),
            rank=ranks[rank],
            peers=[member for member, _ in refusing],
        )
