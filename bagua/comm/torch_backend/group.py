"""The backend name ``bagua`` of ``torch.distributed``: its groups, from the first to the last moment."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from bagua.comm.group import ProcessGroup
from bagua.comm.lifetime.closer import close_with
from bagua.comm.lifetime.forks import family, leak
from bagua.comm.operands import as_seconds
from bagua.comm.records.ledger import Ledger
from bagua.comm.startup.choice import TORCH_NAME
from bagua.comm.startup.formation import configure_log, connect_first, fresh, plan
from bagua.comm.torch_backend.calls import TorchCalls
from bagua.comm.torch_backend.futures import CallbackThread, CallFuture, PlainFutures
from bagua.comm.torch_backend.stand_in import CpuStandIn
from bagua.comm.torch_backend.work import BackwardPass, TorchWork
from bagua.comm.torch_private import (
    default_store,
    do_not_compile,
    nccl_options,
    requested_backends,
    require_known_calls,
    set_default_timeout,
    set_sequence_number,
)
from bagua.errors import ConfigurationError

_GLOO = dist.ProcessGroup.BackendType.GLOO
_NCCL = dist.ProcessGroup.BackendType.NCCL


@dataclass(frozen=True)
class TorchBackendOptions:
    """What ``pg_options`` of ``torch.distributed.init_process_group("bagua")`` and ``new_group`` take.

    Args:
        raise_in_backward: True if the end of a backward pass raises the errors of its allreduces. Without, the
            errors are left to the code that handles the futures of these calls, such as a communication hook.
        ordered_callbacks: True if callbacks of futures run in a thread of their own, in the order of the calls, so that
            they may communicate and wait. Without, they run where torch runs them: in the thread that adds them, if the
            call is complete, and else in one that completes calls, where they must not communicate.

    Example:
        >>> TorchBackendOptions(raise_in_backward=False)
        TorchBackendOptions(raise_in_backward=False, ordered_callbacks=True)
    """

    raise_in_backward: bool = True
    ordered_callbacks: bool = True


class TorchGroup(TorchCalls, dist.ProcessGroup):  # type: ignore[misc]  # the stub has more overloads than callers
    """What ``torch.distributed`` holds for a group whose backend is ``bagua``.

    Args:
        store: key-value store of the ranks of this group alone.
        members: our group of the same ranks, which this one owns.
        stand_in: registered with torch for CPU tensors.
        backends: who serves the tensors of other devices, by device type.
        options: options of this group.
    """

    def __init__(
        self,
        store: dist.Store,
        members: ProcessGroup,
        stand_in: CpuStandIn,
        backends: Mapping[str, Any],
        options: TorchBackendOptions,
    ) -> None:
        dist.ProcessGroup.__init__(self, members.rank, members.size)  # type: ignore[call-arg]  # not in the stub
        TorchCalls.__init__(self, members, stand_in, backends, **dataclasses.asdict(options))
        #: For all who meet the ranks of this group.
        self.store_of_members = store
        self._set_default_backend(_GLOO)
        self._register_backend(torch.device("cpu"), _GLOO, stand_in)
        for device_type, backend in backends.items():
            self._register_backend(torch.device(device_type), _NCCL, backend)
        _open_groups.add(self)
        family.add(self)
        close_with(self, _Belongings(members, self.callbacks))

    def disown(self) -> None:
        """In a forked child: torch's objects are never destroyed there."""
        leak(self)

    # What torch asks a group.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name under which torch knows this backend."""
        return TORCH_NAME

    def get_group_store(self) -> dist.Store:
        """The store of this group."""
        return self.store_of_members

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default deadline of all later calls."""
        for backend in (self._stand_in, *self._backends.values()):
            set_default_timeout(backend, timeout)

    def reconfigure(self, *_: object) -> None:
        """Refuse what torch 2.15 asks of groups of C++: it would meet the stand-in, and change nothing of ours."""
        raise ConfigurationError(
            "groups of backend bagua have no hooks around calls, no windows, and keep their ranks",
            argument="group",
            expected="a group of backend gloo or nccl for these",
            seen="a group of backend bagua",
        )

    get_reconfigure_handle = new_window = reconfigure
    register_pre_hook = register_post_hook = register_abort_hook = reconfigure

    def split_group(self, *_: object, **__: object) -> dist.ProcessGroup:
        """Refuse: torch would give the parts to Gloo or NCCL."""
        raise ConfigurationError(
            "groups of backend bagua are not split",
            argument="split_ranks",
            expected="torch.distributed.new_group(ranks), which all ranks call",
            seen="split_group",
        )

    def __repr__(self) -> str:
        return f"<TorchGroup rank {self.rank()} of {self.size()}: {self.members!r}>"

    # The end.

    def abort(self) -> None:
        """Break all connections, from any thread; peers get an error that says so."""
        self.members.abort("torch.distributed aborted the group")
        for backend in self._backends.values():
            with contextlib.suppress(RuntimeError):  # Without a connection there is nothing to abort.
                backend.abort()

    def shutdown(self) -> None:
        """Leave the group and give back what it holds. Idempotent."""
        _open_groups.discard(self)
        _Belongings(self.members, self.callbacks).close()
        for backend in self._backends.values():
            with contextlib.suppress(RuntimeError):
                backend.shutdown()


class _Belongings:
    """What a group leaves behind when no code holds it any more. Closing it tells the peers, as Gloo does."""

    def __init__(self, members: ProcessGroup, callbacks: CallbackThread | PlainFutures) -> None:
        self._members = members
        self._callbacks = callbacks

    def idle(self) -> bool:
        return self._members.idle()

    def close(self) -> None:
        self._members.close()
        self._callbacks.stop()


class _OpenGroups:
    """The open groups of this process, to be left when it ends."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[TorchGroup] = weakref.WeakSet()
        self._process = -1

    def add(self, group: TorchGroup) -> None:
        self._members.add(group)
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._leave_all)

    def discard(self, group: TorchGroup) -> None:
        self._members.discard(group)

    def _leave_all(self) -> None:
        if self._process == os.getpid():
            for group in list(self._members):
                group.shutdown()


_open_groups = _OpenGroups()


# From torch's request to a group.


def install_torch_backend() -> None:
    """Make the backend name ``bagua`` known to ``torch.distributed``. Idempotent.

    Example:
        >>> install_torch_backend()
        >>> dist.is_backend_available("bagua")
        True
    """
    if not dist.is_backend_available(TORCH_NAME):
        do_not_compile(TorchGroup, TorchCalls, CpuStandIn, TorchWork, CallFuture, BackwardPass)
        # A list: torch would take a string for a list of letters.
        dist.Backend.register_backend(TORCH_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


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
    part = fresh(store, rank)  # Also if an argument is refused: ranks then still agree on how many groups they began.
    install_torch_backend()
    require_known_calls(TorchGroup)
    own, of_nccl = _split_options(options)
    configure_log()
    timeout_s = as_seconds(timeout)
    everyone = list(ranks) or list(range(size))
    members = _connect(part, rank, everyone, timeout_s, f"torch/{name}")
    stand_in = CpuStandIn(dist.PrefixStore("gloo", part), rank, size, timedelta(seconds=timeout_s))
    backends = {"cuda": _nccl(part, rank, size, timeout_s, everyone, name, of_nccl)} if _serves_cuda() else {}
    return TorchGroup(part, members, stand_in, backends, own)


def _create(request: Any, options: Any) -> TorchGroup:
    """The group that torch asks for. Collective among its members.

    Args:
        request: torch's ``_DistributedBackendOptions``.
        options: the user's ``pg_options``.
    """
    _check_nothing_is_dropped(requested_backends())
    ranks = list(request.global_ranks_in_group)  # Torch gives none for the group of all.
    return create_torch_group(
        _store_of_ranks(request.store, ranks),
        request.group_rank,
        request.group_size,
        request.timeout,
        ranks=ranks,
        name=request.group_id,
        options=options,
    )


def _store_of_ranks(store: dist.Store, ranks: list[int]) -> dist.Store:
    """Where ``ranks`` meet: in the store of the default group, under their numbers.

    Torch's ``store`` has the name of the group as its prefix, mostly a number that each rank counts. Torch 2.15 counts
    groups with ``use_local_synchronization``, too, which only their members make. From then on ranks have other numbers
    for one group, and would wait for each other at different places.

    Args:
        store: store of torch, with prefixes for the device and for the group; returned if it is not made like that.
        ranks: global ranks of the group; none for the default group, whose name is the same everywhere.
    """
    of_group = getattr(store, "underlying_store", None)
    if not ranks or not dist.is_initialized() or getattr(of_group, "underlying_store", None) is not default_store():
        return store
    name = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    return dist.PrefixStore(f"bagua/ranks/{name}", default_store())


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


def _connect(store: dist.Store, rank: int, ranks: list[int], timeout_s: float, label: str) -> ProcessGroup:
    """Our group of these ranks, on the best transport for CPU tensors."""
    planned = plan(store, rank, ranks, None, timeout_s, use_cuda=False)
    return connect_first(store, rank, ranks, planned, timeout_s, Ledger(), label)


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
