"""``init_process_group``: finding the other ranks, and agreeing with them on hosts and transport."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from types import NoneType

import torch.distributed as dist
from typing_extensions import Never

from bagua import env
from bagua.checks import check_kind
from bagua.comm.addresses import advice_on_interfaces, own_address
from bagua.comm.group import ProcessGroup
from bagua.comm.operands import as_seconds
from bagua.comm.records.recorder import Place, observers
from bagua.comm.startup.default_group import World, destroy_process_group, holder, is_initialized
from bagua.comm.startup.formation import configure_log, connect_first, fresh, plan
from bagua.comm.store.asking import Beats, meeting
from bagua.comm.store.keys import missing_keys
from bagua.comm.store.serving import connect_store, serve_store, wait_for_listener
from bagua.comm.torch_private import default_store, unwrapped
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    ConfigurationError,
    InvalidTypeError,
    RepeatedInitializationError,
    TransportUnavailableError,
)

#: As in torch: long enough for a checkpoint on rank 0, short enough to notice.
DEFAULT_TIMEOUT_S = 1800.0
#: Network device over which nobody reaches a job of one host.
_LOOPBACK = "lo"
_COMMAND = "baguarun --nproc 2 train.py (or: torchrun --nproc_per_node 2 train.py)"


def init_process_group(
    *unnamed: Never,
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
        unnamed: an error. Torch's first argument is the backend, that of the original Bagua the store.
        backend: ``gloo``, ``nccl``, or any other that ``torch.distributed`` knows; ``shm``
            for processes of one Linux host, ``hybrid`` for several such hosts; ``threads``
            for ranks that are threads of one process. None chooses NCCL for CUDA tensors
            and Gloo for others where there is CUDA; else ``shm`` or ``hybrid`` where ranks
            can share memory, else Gloo. ``BAGUA_LOG=info`` shows which and why.
        timeout: default deadline of every call, in seconds or as a ``timedelta``; else
            ``BAGUA_TIMEOUT_S``, else 30 minutes.
        store: a ``torch.distributed`` store to meet at, with ``rank`` and ``world_size``.
        rank: number of this process; by default from the launcher.
        world_size: number of processes; else from the launcher.
        local_world_size: processes per host, if hosts hold consecutive blocks of ranks
            and bagua need not find out.

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
            "init_process_group() was called before", advice="Call it once, or destroy_process_group() in between."
        )
    if unnamed:
        raise InvalidTypeError(
            "the arguments of init_process_group() need their names",
            expected="backend=, timeout=, store=, rank=, world_size= or local_world_size=",
            seen=", ".join(map(repr, unnamed)),
            advice="To choose a backend, write init_process_group(backend='gloo').",
        )
    check_kind((str, NoneType), "the name of a backend, or None", backend=backend)
    configure_log()
    backend = unwrapped(backend)
    timeout = env.timeout_s() if timeout is None else timeout
    timeout_s = DEFAULT_TIMEOUT_S if timeout is None else as_seconds(timeout)
    if store is None and holder.is_thread(backend):
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
        store = default_store()
    else:
        rank, world_size = resolve_rank(rank, world_size)
        holder.report(rank, backend)  # The start may fail, too.
        store = connect(rank, world_size, timeout_s) if store is None else store
    ranks = range(world_size)
    store = fresh(store, rank, ranks, timeout_s)
    planned = plan(store, rank, ranks, backend, timeout_s, nodes=_nodes, local_world_size=local_world_size)
    backend = planned.choices[0][0]
    owns_torch = not joined and not dist.is_initialized() and not holder.is_thread(backend)
    if owns_torch:
        _init_torch(store, rank, planned.nodes, backend, timeout_s)
    try:
        group = connect_first(store, rank, ranks, planned, timeout_s)
    except BaseException:
        if owns_torch:
            dist.destroy_process_group()
        raise
    holder.put(World(group, owns_torch), group.backend)
    _tell_observers(group, store)


def _tell_observers(group: ProcessGroup, store: dist.Store) -> None:
    """Have the rank watched; if an observer refuses, the rank is not initialized."""
    place = Place(group.label, group.backend, group.rank, group.ranks)
    try:
        for observer in observers:
            observer.started(group.recorder, place, Beats(store, group.rank))
    except BaseException:
        destroy_process_group()
        raise


def _for_gloo(nodes: Sequence[int]) -> dict[str, str]:
    """Variables with which Gloo of torch listens on the loopback device alone, for a job of one host."""
    alone = len(set(nodes)) == 1 and _LOOPBACK in (name for _, name in socket.if_nameindex())
    return {"GLOO_SOCKET_IFNAME": _LOOPBACK} if alone else {}


def _init_torch(store: dist.Store, rank: int, nodes: Sequence[int], backend: str, timeout_s: float) -> None:
    """Initialize ``torch.distributed`` as well, for everything in torch that needs it."""
    name, started = "cpu:gloo,cuda:nccl" if "nccl" in backend else "gloo", time.monotonic()
    world_size = len(nodes)
    keys = [f"came_to_torch/{other}" for other in range(world_size)]
    with meeting("init_process_group", rank, range(world_size)):
        store.set(keys[rank], "")
    try:
        with env.with_defaults(_for_gloo(nodes)):
            dist.init_process_group(
                name,
                store=dist.PrefixStore("torch", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
    except RuntimeError as error:
        raise _without_torch(error, store, rank, keys, time.monotonic() - started, timeout_s) from error


def _without_torch(
    error: RuntimeError, store: dist.Store, rank: int, keys: list[str], elapsed_s: float, timeout_s: float
) -> CommunicationError:
    """What is raised for an error of ``torch.distributed``, which does not know who is missing."""
    missing: list[int] = []
    with contextlib.suppress(RuntimeError):  # The store may be gone, too.
        missing = missing_keys(store, keys)
    kind = CollectiveTimeoutError if missing else TransportUnavailableError
    return kind(
        f"torch.distributed could not be set up: {error}",
        rank=rank,
        call="init_process_group",
        peers=tuple(missing),
        elapsed_s=elapsed_s,
        timeout_s=timeout_s,
        advice="Look first at the output of the ranks that did not come."
        if missing
        else f"{advice_on_interfaces()} This rank told the others {own_address()}.",
    )


# How ranks find each other: who this process is, and the store where all of them meet.


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
    if address is None or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"a world of {world_size} processes, but no address where they meet",
            argument="MASTER_ADDR, MASTER_PORT",
            expected="both in the environment, as a launcher sets them; the port from 1 to 65535",
            seen=f"MASTER_ADDR {address or 'unset'}, MASTER_PORT {port or 'unset'}",
            advice=f"Start the script with: {_COMMAND}",
        )
    agent_hosts = found.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not agent_hosts:
        store = holder.hosted[os.getpid(), port] = _host_store(address, int(port), timeout_s)
    else:
        store = _join_store(address, int(port), rank, timeout_s, by_agent=agent_hosts)
    # A restarted job must not read what the failed attempt left in the agent's store.
    return dist.PrefixStore(f"attempt{found.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _host_store(address: str, port: int, timeout_s: float) -> dist.Store:
    try:
        return serve_store(address, port, timedelta(seconds=timeout_s), shared=True)[0]
    except (RuntimeError, ValueError) as error:
        taken = "EADDRINUSE" in str(error)
        raise ConfigurationError(
            f"port {port} is taken, so rank 0 cannot open the store where all ranks meet"
            if taken
            else f"rank 0 cannot open the store where all ranks meet: {error}",
            argument="MASTER_ADDR, MASTER_PORT",
            expected="an address of this host, and a free port",
            seen=f"{address}:{port}",
            advice="End the process that has it, which may be another rank 0, or choose another port." if taken else "",
        ) from error


def _join_store(address: str, port: int, rank: int, timeout_s: float, *, by_agent: bool) -> dist.Store:
    started = time.monotonic()
    try:
        return connect_store(port, wait_for_listener(address, port, timeout_s), address)
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
