"""How ranks find each other: who this process is, and the store where all of them meet."""

from __future__ import annotations

import os
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta

import torch.distributed as dist

from bagua import env
from bagua.comm.lifetime.background import BackgroundThread
from bagua.comm.lifetime.forks import family, leak
from bagua.comm.store.serving import connect_store, serve_store, wait_for_listener
from bagua.errors import CollectiveTimeoutError, ConfigurationError

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
        store = _hosted.stores[os.getpid(), port] = _host_store(address, int(port), timeout_s)
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
        return _client(address, port, wait_for_listener(address, port, timeout_s))
    except (OSError, RuntimeError, FutureTimeoutError) as error:
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


def _client(address: str, port: int, timeout_s: float) -> dist.Store:
    """A store that another process hosts. Torch waits without end for the answer of a server that is no store."""
    thread = BackgroundThread("bagua-store")
    try:
        return thread.submit(lambda: connect_store(port, timeout_s, address)).result(timeout_s)
    finally:
        thread.stop(timeout_s=0.0)
