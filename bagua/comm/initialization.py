"""``init_process_group``: finding the other ranks, and agreeing with them on hosts and transport."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bagua import env
from bagua.comm.arguments import as_seconds
from bagua.comm.backends import refusal
from bagua.comm.choice import abilities, candidates
from bagua.comm.group import Ledger, ProcessGroup
from bagua.comm.hosts import host_identity, nodes_from_identities, nodes_from_local_size
from bagua.comm.rendezvous import connect, exchange, refuse_together, resolve_rank
from bagua.comm.world import World, holder, is_initialized
from bagua.errors import (
    CollectiveMismatchError,
    ConfigurationError,
    RepeatedInitializationError,
    TransportUnavailableError,
)

__all__ = ["init_process_group"]

_log = logging.getLogger("bagua")

#: As in torch: long enough for a checkpoint on rank 0, short enough to notice.
DEFAULT_TIMEOUT_S = 1800.0


def init_process_group(
    *,
    backend: str | None = None,
    timeout: float | timedelta | None = None,
    store: dist.Store | None = None,
    rank: int = -1,
    world_size: int = -1,
    local_world_size: int = -1,
    _nodes: Sequence[int] | None = None,
) -> None:
    """Find the other processes and connect to them. Everything else needs this first.

    Under a launcher (``torchrun``, ``baguarun``, ``mpirun``, ``srun``) no argument is
    needed; without one, the process is a world of its own. ``torch.distributed`` is
    initialized too; a default group of it that exists already is joined.

    Args:
        backend: ``gloo``, ``nccl``, or any other that ``torch.distributed`` knows; ``shm``
            for processes of one Linux host, ``hybrid`` for several such hosts; ``threads``
            for ranks that are threads of one process. None chooses NCCL for CUDA tensors
            and Gloo for others where there is CUDA; else ``shm`` or ``hybrid`` where ranks
            can share memory, else Gloo. ``BAGUA_LOG=info`` shows which and why.
        timeout: default deadline of every call, in seconds or as a ``timedelta``; else
            ``BAGUA_TIMEOUT_S``, else 30 minutes.
        store: a ``torch.distributed`` store to meet at, with ``rank`` and ``world_size``.
        rank: of this process; else from the launcher.
        world_size: number of processes; else from the launcher.
        local_world_size: processes per host, if hosts hold consecutive blocks of ranks
            and shall not be found out.

    Raises:
        RepeatedInitializationError: it was called before.
        ConfigurationError: rank or world size are missing or wrong.
        CollectiveTimeoutError: ranks that did not come by the timeout, as ``peers``.
        TransportUnavailableError: the backend cannot run on some rank, on all ranks.

    Example:
        >>> import bagua.comm
        >>> bagua.comm.init_process_group()
        >>> bagua.comm.get_world_size()
        1
        >>> bagua.comm.destroy_process_group()
    """
    if is_initialized():
        raise RepeatedInitializationError(
            "init_process_group() was called before",
            advice="Call it once, or destroy_process_group() in between.",
        )
    _configure_log()
    timeout_s = DEFAULT_TIMEOUT_S if (found := env.timeout_s()) is None else found
    timeout_s = timeout_s if timeout is None else as_seconds(timeout)
    if store is None and backend == "threads":
        raise ConfigurationError(
            "ranks that are threads meet at a store that they share",
            argument="store",
            expected="one torch.distributed.HashStore for all of them",
            seen=None,
            advice="bagua.testing.ThreadRanks does all of this.",
        )
    joined = store is None and dist.is_initialized()
    if joined:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    else:
        rank, world_size = resolve_rank(rank, world_size)
        store = connect(rank, world_size, timeout_s) if store is None else store
    store = _fresh(store, rank)
    answers = _meet(store, rank, world_size, backend, timeout_s)
    nodes = _nodes or _layout(answers, world_size, local_world_size)
    choices = candidates(answers, nodes) if backend is None else [(backend, "it was asked for")]
    backend = choices[0][0]
    refuse_together(store, "refusal", rank, range(world_size), refusal(backend), timeout_s)
    owns_torch = not joined and not dist.is_initialized() and backend != "threads"
    if owns_torch:
        _init_torch(store, rank, world_size, backend, timeout_s)
    ledger = Ledger()
    try:
        group = _first_that_connects(store, rank, nodes, choices, timeout_s, ledger)
    except BaseException:
        if owns_torch:
            dist.destroy_process_group()
        raise
    holder.put(World(group, ledger, owns_torch), group.backend)


def _first_that_connects(
    store: dist.Store,
    rank: int,
    nodes: Sequence[int],
    choices: Sequence[tuple[str, str]],
    timeout_s: float,
    ledger: Ledger,
) -> ProcessGroup:
    """The group of all ranks on the first backend that all of them can use.

    A transport that cannot connect says so on every rank, hence all go on to the same next one.
    """
    world_size = len(nodes)
    for number, (backend, reason) in enumerate(choices):
        members = dist.PrefixStore(f"world{number}", store)
        try:
            group = ProcessGroup(members, rank, range(world_size), nodes, backend, timeout_s, "world", ledger)
        except TransportUnavailableError as error:
            if number == len(choices) - 1:
                raise
            _log.info("rank %d of %d: not %s: %s", rank, world_size, backend, error)
        else:
            _log.info(
                "rank %d of %d: backend %s because %s; hosts of %s",
                rank, world_size, backend, reason, group.node_sizes,
            )  # fmt: skip
            return group
    raise AssertionError("there is always a last choice")


def _configure_log() -> None:
    level = env.log_level()
    if level is None:
        return
    try:
        _log.setLevel(level.upper())
    except ValueError:
        raise ConfigurationError(
            "an environment variable is not a log level",
            argument="BAGUA_LOG",
            expected="debug, info, warning or error",
            seen=repr(level),
        ) from None
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("bagua %(levelname)s: %(message)s"))
        _log.addHandler(handler)


def _fresh(store: dist.Store, rank: int) -> dist.Store:
    """A part of ``store`` that no earlier initialization has written to.

    The generation is counted per rank, so it agrees when all ranks start anew, and a
    single rank that was restarted waits for the others instead of reading old keys.
    """
    generation = store.add(f"bagua/generation/{rank}", 1)
    return dist.PrefixStore(f"bagua/{generation}", store)


def _meet(store: dist.Store, rank: int, world_size: int, backend: str | None, timeout_s: float) -> list[dict[str, Any]]:
    """Wait for everyone, and learn what each of them has and wants."""
    own = {
        "backend": backend,
        "world_size": world_size,
        "host": host_identity(),
        **abilities(),
    }
    answers: list[dict[str, Any]] = exchange(store, "init_process_group", rank, range(world_size), own, timeout_s)
    for member, answer in enumerate(answers):
        for fact in ("backend", "world_size"):
            if answer[fact] != own[fact]:
                raise CollectiveMismatchError(
                    f"ranks were started with different values of {fact}",
                    rank=rank,
                    call="init_process_group",
                    peers=(member,),
                    expected=own[fact],
                    seen=answer[fact],
                )
    return answers


def _layout(answers: list[dict[str, Any]], world_size: int, local_world_size: int) -> tuple[int, ...]:
    if local_world_size >= 0:
        return nodes_from_local_size(world_size, local_world_size)
    return nodes_from_identities([answer["host"] for answer in answers])


def _init_torch(store: dist.Store, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
    """Initialize ``torch.distributed`` as well, for everything in torch that needs it."""
    nccl = "nccl" in backend or backend == "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if nccl else "gloo",
        store=dist.PrefixStore("torch", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
