"""From a request of ``torch.distributed`` to a group of backend ``bagua``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua.comm.group import solo_group
from bagua.comm.lifetime.background import close_with
from bagua.comm.lifetime.forks import family
from bagua.comm.operands import as_seconds
from bagua.comm.startup.formation import configure_log, connect_first, fresh, plan
from bagua.comm.torch_backend.group import TorchGroup, leave_at_exit
from bagua.comm.torch_backend.starter import CallStarter, Connected, CpuStandIn, TorchBackendOptions
from bagua.comm.torch_backend.work import BackwardPass, CallFuture, TorchWork
from bagua.comm.torch_private import (
    TORCH_NAME,
    default_store,
    nccl_options,
    plugins,
    requested_backends,
    require_known_calls,
    set_sequence_number,
    store_of,
)
from bagua.errors import ConfigurationError
from bagua.torch_private import do_not_compile


def install_torch_backend() -> None:
    """Make the backend name ``bagua`` known to ``torch.distributed``. Idempotent.

    Example:
        >>> install_torch_backend()
        >>> dist.is_backend_available("bagua")
        True
    """
    if TORCH_NAME.upper() not in plugins():  # Torch itself would look for an entry point first.
        # A list: torch would take a string for a list of letters.
        dist.Backend.register_backend(TORCH_NAME, create_requested_group, extended_api=True, devices=["cpu", "cuda"])


@cache
def _keep_from_compilers() -> None:
    kinds = (TorchGroup, CallStarter, CpuStandIn, TorchWork, CallFuture, BackwardPass)
    do_not_compile(*(method for kind in kinds for method in vars(kind).values() if isinstance(method, FunctionType)))


def create_torch_group(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: float | timedelta = 1800.0,
    *,
    ranks: Sequence[int] = (),
    name: str = "created",
    options: TorchBackendOptions | Any = None,
) -> TorchGroup:
    """A group of backend ``bagua`` for ``torch.distributed``, beside its default group or without one. Collective.

    For software that makes its groups itself, and makes them anew when ranks come and go. Close it with ``shutdown()``,
    or drop it.

    Args:
        store: the ranks of this group share it, and no other group has it: a ``PrefixStore`` for each.
        rank: number of this process in the group.
        size: number of ranks.
        timeout: default deadline of every call, and of this one, in seconds or as a ``timedelta``.
        ranks: the global rank of each; its number in the group if left out.
        name: name of the group, for logs.
        options: options of the group, or those of NCCL where there is CUDA.

    Raises:
        CollectiveTimeoutError: ranks that did not come in time.
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> group = create_torch_group(dist.HashStore(), rank=0, size=1)
        >>> group.allreduce(torch.ones(2)).wait()
        True
        >>> group.shutdown()
    """
    connect = partial(_connect, name=name, options=options)
    return _made_of(connect(store, rank, list(ranks) or list(range(size)), as_seconds(timeout)), connect, options)


def _connect(store: dist.Store, rank: int, ranks: list[int], timeout_s: float, *, name: str, options: Any) -> Connected:
    # Also if an argument is refused: ranks then still count the same groups.
    part = fresh(store, rank, ranks, timeout_s)
    of_nccl = _split_options(options)[1]
    configure_log()
    planned = plan(part, rank, ranks, None, timeout_s, use_cuda=False)  # Ours serve CPU tensors.
    members = connect_first(part, rank, ranks, planned, timeout_s, f"torch/{name}")
    of_gloo = dist.PrefixStore("gloo", part)
    stand_in = CpuStandIn(of_gloo, rank, len(ranks), timedelta(seconds=timeout_s), len(set(planned.nodes)))
    backends = {"cuda": _nccl(part, rank, len(ranks), timeout_s, ranks, name, of_nccl)} if _serves_cuda() else {}
    return Connected(part, members, stand_in, backends)


def _made_of(connected: Connected, connect: Callable[..., Connected], options: Any) -> TorchGroup:
    install_torch_backend()
    require_known_calls(TorchGroup)
    _keep_from_compilers()
    starter = CallStarter(connected, _split_options(options)[0])
    group = TorchGroup(starter, connect)
    group.register()
    leave_at_exit(group)
    family.add(group)
    close_with(group, starter)
    return group


def create_requested_group(request: Any, options: Any) -> TorchGroup:
    """The group that torch asks for. Collective among its members.

    Args:
        request: torch's ``_DistributedBackendOptions``.
        options: the user's ``pg_options``.
    """
    _check_nothing_is_dropped(requested_backends())
    ranks = list(request.global_ranks_in_group)  # Torch gives none for the group of all.
    rank, size = request.group_rank, request.group_size
    if getattr(request, "enable_reconfigure", False):
        return _unconnected(rank, size, request.timeout, request.group_id, options)
    store = _store_of_ranks(request.store, ranks)
    group = create_torch_group(store, rank, size, request.timeout, ranks=ranks, name=request.group_id, options=options)
    parent = dist.group.WORLD if ranks else None
    if isinstance(parent, TorchGroup):
        parent.offspring.add(group)
    return group


def _unconnected(rank: int, size: int, timeout: timedelta, name: str, options: Any) -> TorchGroup:
    """What refuses all calls until it is reconfigured for the first time."""
    members, store = solo_group(), dist.HashStore()
    members.abort("reconfigure() has not been called yet")
    connected = Connected(store, members, CpuStandIn(store, 0, 1, timeout, 1), {})
    group = _made_of(connected, partial(_connect, name=name, options=options), options)
    group.place = (rank, size)
    return group


def _store_of_ranks(store: dist.Store, ranks: list[int]) -> dist.Store:
    """Where ``ranks`` meet: in the store of the default group, under their numbers.

    Torch's ``store`` has the name of the group as its prefix, mostly a number that each rank counts. Torch 2.15 counts
    groups with ``use_local_synchronization``, too, which only their members make. From then on ranks have other numbers
    for one group, and would wait for each other at different places.

    Args:
        store: store of torch, with prefixes for the device and for the group; returned if it is not made like that.
        ranks: global ranks of the group; none for the default group, whose name is the same everywhere.
    """
    world, of_group = dist.group.WORLD, getattr(store, "underlying_store", None)
    if not ranks or world is None or getattr(of_group, "underlying_store", None) is not default_store():
        return store
    name = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    # That of a default group of ours is another one since it was reconfigured.
    return dist.PrefixStore(f"bagua/ranks/{name}", store_of(world))


def _split_options(options: Any) -> tuple[TorchBackendOptions, Any]:
    """Our options, and those of NCCL, out of what the user passed."""
    if options is None or isinstance(options, TorchBackendOptions):
        return options or TorchBackendOptions(), None
    if _serves_cuda() and isinstance(options, dist.ProcessGroupNCCL.Options):
        return TorchBackendOptions(), options
    raise ConfigurationError(
        "backend bagua does not take these options",
        argument="pg_options",
        expected="bagua.torch_api.TorchBackendOptions, or options of NCCL where there is CUDA",
        seen=type(options).__name__,
    )


def _serves_cuda() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


def _nccl(store: dist.Store, rank: int, size: int, timeout_s: float, ranks: list[int], name: str, options: Any) -> Any:
    """NCCL for the CUDA tensors of a group; it connects when it is first used."""
    options = nccl_options(timedelta(seconds=timeout_s), options)
    options.global_ranks_in_group = ranks
    options.group_name = name
    nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
    set_sequence_number(nccl)
    return nccl


def _check_nothing_is_dropped(asked_for: c10d.BackendConfig | None) -> None:
    """Refuse a string of several backends that torch would silently not build.

    Args:
        asked_for: devices and backends that torch read out of the string; None if that is not known.
    """
    if asked_for is None:
        return
    for device_type, name in asked_for.get_device_backend_map().items():
        served = (name == TORCH_NAME and device_type in ("cpu", "cuda")) or (
            name == "nccl" and device_type == "cuda" and _serves_cuda()
        )
        if not served:
            raise ConfigurationError(
                f"torch.distributed would silently not build {device_type}:{name} beside bagua",
                argument="backend",
                expected="'bagua' alone: it serves CPU tensors, and CUDA tensors through NCCL where there is CUDA",
                seen=str(asked_for),
            )
