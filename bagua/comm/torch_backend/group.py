"""What ``torch.distributed`` holds for a group of backend ``bagua``: its calls, made on a communicator of ours.

C++ calls eleven of these methods by name (DDP, functional collectives). One that is missing falls through to C++, which
holds the interpreter's lock while it waits: a deadlock. So all of them are here, in the spelling of each version.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bagua.comm.communicator import Communicator
from bagua.comm.lifetime.forks import leak
from bagua.comm.operands import as_seconds, check_rank, reduction_name
from bagua.comm.reduction import copy_pieces, fold
from bagua.comm.torch_backend.forms import HAS_HOOKS, Passage, hookable, takes
from bagua.comm.torch_backend.starter import CallStarter, Connected, MeetingPoint, meet
from bagua.comm.torch_backend.work import TorchWork
from bagua.comm.torch_forms import (
    allgather_tensors,
    alltoall_rows,
    alltoall_tensors,
    gather_tensors,
    reduce_scatter_tensors,
    rows_for,
    scatter_tensors,
)
from bagua.comm.torch_forms import flat as flat_of
from bagua.comm.torch_private import TORCH_NAME, end_coalescing, method_of, start_coalescing
from bagua.errors import ConfigurationError, InvalidTensorError


def as_one(backend: Any, name: str, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
    """Several calls of one kind as one work; a backend has no methods for that in Python."""
    call = method_of(backend, name)
    start_coalescing(backend)
    for output, tensor in zip(outputs, tensors, strict=True):
        call(output, tensor, opts)
    return end_coalescing(backend)


def first(tensors: Sequence[Tensor]) -> Tensor:
    """The first of ``tensors``."""
    if not tensors:
        raise InvalidTensorError("a call needs a tensor", argument="tensors", expected="a tensor", seen="none")
    return tensors[0]


def only(items: Any) -> Any:
    """The only one of ``items``; a tensor that is not in a list is meant itself."""
    if isinstance(items, Tensor):
        return items
    if len(items) != 1:
        raise InvalidTensorError(
            "this call takes one tensor at a time", argument="tensors", expected="one", seen=len(items)
        )
    return items[0]


def require_equal(what: str, expected: int, seen: int) -> None:
    """Raise unless there are as many as a call needs."""
    if expected != seen:
        raise InvalidTensorError(f"wrong number of {what}", argument="tensors", expected=expected, seen=seen)


def rows_of(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of tensors that are alike, one in each row."""
    first(tensors)
    rows_for(tensors)  # checks that
    return flat_of(tensors).view(len(tensors), -1)


_GLOO = dist.ProcessGroup.BackendType.GLOO
_NCCL = dist.ProcessGroup.BackendType.NCCL
#: Messages have no options of their own; these say asynchronous, and the group's deadline.
_MESSAGE = c10d.BarrierOptions()


class TorchGroup(dist.ProcessGroup):
    """A group of ``torch.distributed``, with CPU tensors travelling by our transports.

    Args:
        starter: makes its calls, and ends with it.
        connect: connects the members of what this group becomes; None if it stays as it is.
    """

    def __init__(self, starter: CallStarter, connect: Callable[..., Connected] | None = None) -> None:
        super().__init__(starter.members.rank, starter.members.size)  # type: ignore[call-arg]  # not in the stub
        #: For all who meet the ranks of this group.
        self.store_of_members = starter.store
        self.members = starter.members
        self._starter = starter
        self._connect = connect
        #: Rank and size; those of ``members``, once these are connected.
        self.place = (starter.members.rank, starter.members.size)
        #: Groups that torch made of this one.
        self.offspring: weakref.WeakSet[TorchGroup] = weakref.WeakSet()
        self._point = MeetingPoint()
        #: Through which watched calls go; None where torch has no hooks.
        self.passage: Passage | None = None

    def register(self) -> None:
        """Give torch the backends that it asks for by device."""
        self._set_default_backend(_GLOO)
        backends = dict(self._starter.torch_backends)
        if HAS_HOOKS:
            backends["cpu"] = self.passage = Passage(backends["cpu"])
        for device_type, backend in backends.items():
            self._register_backend(torch.device(device_type), _GLOO if device_type == "cpu" else _NCCL, backend)

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
        self._starter.set_timeout(timeout)

    def new_window(self, *_: object) -> None:
        """Refuse what torch 2.15 asks of groups of C++: it would meet the stand-in."""
        raise ConfigurationError(
            "groups of backend bagua have no windows",
            argument="group",
            expected="a group of backend gloo or nccl for these",
            seen="a group of backend bagua",
        )

    def register_pre_hook(self, *arguments: Any) -> None:
        """Have torch call a hook before each call on CPU tensors; torch has hooks from 2.14 on."""
        self._watched_with("register_pre_hook", arguments)

    def register_post_hook(self, *arguments: Any) -> None:
        """Have torch call a hook after the start of each call on CPU tensors."""
        self._watched_with("register_post_hook", arguments)

    def _watched_with(self, method: str, arguments: tuple[Any, ...]) -> None:
        register = getattr(super(), method)  # An older torch lacks it.
        if self.passage is not None:
            self.passage.watched = True
        register(*arguments)

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Number of this process in the group."""
        return self.place[0]

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Number of ranks."""
        return self.place[1]

    rank, size = getRank, getSize

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

    # Other members.

    @property
    def supports_reconfigure(self) -> bool:
        """Whether ``reconfigure`` gives this group other members."""
        return self._connect is not None

    def get_reconfigure_handle(self) -> str:
        """What the other members need for ``reconfigure``; to be sent to them in any way. The same in every call."""
        return self._point.handle()

    def reconfigure(self, opts: Any) -> TorchWork:
        """Go on with other members behind this object. Collective among them; returns when all are connected.

        Calls under way end with an error, and so do later ones of groups that were made of this one. The store of this
        group so far is not asked. If this fails, calls raise ``CommunicatorClosedError`` until it succeeds.

        Args:
            opts: ``torch.distributed``'s ``ReconfigureOptions``, or those of ``bagua.comm``.

        Raises:
            ConfigurationError: handles of other groups or of another job.
            PeerLostError: the first of the members is gone.
            CollectiveTimeoutError: some of the others did not come in time; ``peers`` has their places.
        """
        assert self._connect is not None
        rank, handles = self._point.order(opts.handles)
        timeout_s = self._starter.timeout_s if opts.timeout is None else as_seconds(opts.timeout)
        until = time.monotonic() + timeout_s
        for group in (*self.offspring, self):
            group.dismiss("the group was reconfigured")
        self.offspring.clear()
        store = dist.PrefixStore(f"bagua/reconfigured/{opts.uuid}", meet(handles[0], rank, timeout_s))
        left_s = max(until - time.monotonic(), 0.001)
        connected = self._connect(store, rank, list(range(len(handles))), left_s)
        self._starter.renew(connected)
        self.store_of_members, self.members = connected.store, connected.members
        self.place = (rank, len(handles))
        leave_at_exit(self)
        return TorchWork(None, [], self._starter.callbacks)

    def dismiss(self, reason: str) -> None:
        """End all calls, here and on the other members, and refuse later ones."""
        self._starter.abort(reason)
        self._starter.close()

    # The end.

    def abort(self) -> None:
        """Break all connections, from any thread; peers get an error that says so."""
        if self.passage is not None:
            self.passage.fire_abort_hooks()
        self._starter.abort("torch.distributed aborted the group")

    def shutdown(self) -> None:
        """Leave the group and give back what it holds. Idempotent."""
        _open_groups.discard(self)
        self._starter.shutdown()
        self._point.close()

    def elsewhere(self, tensors: Any) -> Any:
        """Who takes calls with the first of ``tensors``, which may be a single one, instead of us, if anybody."""
        if isinstance(tensors, Tensor):
            return self._starter.elsewhere(tensors)
        return self._starter.elsewhere(tensors[0]) if tensors else None

    def _make(self, opts: Any, outputs: list[Tensor], call: Callable[..., Any], *arguments: Any) -> Any:
        """Start ``call``, which takes a communicator and ``arguments``."""
        return self._starter.start(opts, outputs, [partial(call, self._starter.collectives, *arguments)])

    def _make_each(
        self, opts: Any, outputs: list[Tensor], call: Callable[..., Any], pairs: Iterable[Any], *arguments: Any
    ) -> Any:
        """Start ``call`` with each of ``pairs`` and ``arguments``, as one work."""
        calls = [partial(call, self._starter.collectives, *pair, *arguments) for pair in pairs]
        return self._starter.start(opts, outputs, calls)

    # What C++ calls.

    @takes(c10d.AllreduceOptions, "tensors:list opts", "tensors:list op timeout", "tensor op timeout")
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce in place; several tensors of one call with each other, too."""
        if len(tensors) != 1:
            return self._allreduce_together(tensors, opts)
        started = self._make(opts, tensors, Communicator.allreduce, tensors[0], opts.reduceOp.op)
        self._starter.raise_in_backward(started)
        return started

    def _allreduce_together(self, tensors: list[Tensor], opts: Any) -> Any:
        rows, operation = rows_of(tensors), opts.reduceOp.op
        total = fold([*rows], reduction_name(operation, rows.dtype), torch.empty_like(rows[0]))

        def finish() -> None:
            copy_pieces(tensors, [total] * len(tensors))

        call = partial(self._starter.collectives.allreduce, total, operation)
        return self._starter.start(opts, tensors, [call], finish)

    @takes(c10d.AllreduceCoalescedOptions, "tensors:list opts")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce all tensors in place, with one message for each dtype."""
        return self._make(opts, tensors, Communicator.allreduce_coalesced, tensors, opts.reduceOp.op)

    @takes(c10d.BroadcastOptions, "tensors:list opts", "tensor root:rank timeout")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy the tensor of one rank to all others; of several, one to all of them."""
        if len(tensors) == 1:
            return self._make(opts, tensors, Communicator.broadcast, tensors[0], opts.rootRank)
        rows = rows_of(tensors)
        sent = rows[check_rank(opts.rootTensor, len(tensors), "rootTensor")]

        def finish() -> None:
            copy_pieces(tensors, [sent] * len(tensors))

        call = partial(self._starter.collectives.broadcast, sent, opts.rootRank)
        return self._starter.start(opts, tensors, [call], finish)

    @takes(
        c10d.AllgatherOptions,
        "output_tensors:lists input_tensors:list opts",
        "output_tensors:list input_tensor:tensor timeout",
    )
    def allgather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather the tensors of all ranks into a list, in rank order; of several, all into each list."""
        first(tensors)
        require_equal("output lists, one for each tensor", len(tensors), len(output_lists))
        for outputs in output_lists:
            require_equal("output tensors", len(tensors) * self.members.size, len(outputs))
        every = [output for outputs in output_lists for output in outputs]
        flat = rows_for(every)[: len(output_lists[0])]
        source = tensors[0] if len(tensors) == 1 else rows_of(tensors)

        def finish() -> None:
            for outputs in output_lists:
                copy_pieces(outputs, flat.unbind())

        return self._starter.start(opts, every, [partial(self._starter.collectives.allgather, flat, source)], finish)

    @takes(c10d.AllgatherOptions, "outputs:list inputs:list opts", anywhere=True)
    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Gather each tensor of all ranks into one output."""
        if other := self.elsewhere(tensors):
            return as_one(other, "all_gather_single", outputs, tensors, opts)
        require_equal("output tensors", len(tensors), len(outputs))
        return self._make_each(opts, outputs, Communicator.allgather, zip(outputs, tensors, strict=True))

    @takes(
        c10d.ReduceScatterOptions, "output_tensors:list input_tensors:lists opts", "output:tensor input:list op timeout"
    )
    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """Reduce a list of tensors over all ranks and give each rank its part."""
        arguments = only(outputs), only(input_lists), opts.reduceOp.op
        return self._make(opts, outputs, reduce_scatter_tensors, *arguments)

    @takes(c10d.ReduceScatterOptions, "outputs:list inputs:list opts", anywhere=True)
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Reduce each tensor over all ranks and give each rank its part."""
        if other := self.elsewhere(outputs):
            return as_one(other, "reduce_scatter_single", outputs, tensors, opts)
        require_equal("input tensors", len(outputs), len(tensors))
        pairs = zip(outputs, tensors, strict=True)
        return self._make_each(opts, outputs, Communicator.reduce_scatter, pairs, opts.reduceOp.op)

    @takes(
        c10d.AllToAllOptions,
        "output:tensor input:tensor output_split_sizes:sizes input_split_sizes:sizes opts",
        "output:tensor input:tensor output_split_sizes:sizes input_split_sizes:sizes timeout",
    )
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any
    ) -> Any:
        """Send some of the first dimension to each rank; the same to each if no sizes are given."""
        return self._make(opts, [output], alltoall_rows, output, tensor, output_sizes, input_sizes)

    @takes(c10d.BarrierOptions, "opts", "timeout", anywhere=True)
    def barrier(self, opts: Any) -> Any:
        """Return when all ranks are here; a barrier of the devices if the caller names them."""
        if opts.device_ids and (other := self._starter.backends.get("cuda")):
            return other.barrier(opts)
        return self._make(opts, [], Communicator.barrier)

    @hookable
    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803 - torch's name
        """Send a tensor to one rank."""
        return self._message("send", self._starter.messages.send, tensors, tag, dstRank)

    @hookable
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803 - torch's name
        """Receive a tensor from one rank."""
        return self._message("recv", self._starter.messages.recv, tensors, tag, srcRank)

    # What Python calls.

    @takes(c10d.AllgatherOptions, "output:tensor input:tensor opts")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Gather a tensor of all ranks into one output."""
        return self._make(opts, [output], Communicator.allgather, output, tensor)

    @takes(c10d.AllgatherOptions, "output_lists:lists input_list:list opts", anywhere=True)
    def allgather_coalesced(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather several tensors; here ``output_lists`` has one list for each rank."""
        require_equal("output lists, one for each rank", self.members.size, len(output_lists))
        for outputs in output_lists:
            require_equal("output tensors", len(tensors), len(outputs))
        per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        if other := self._starter.elsewhere(first(tensors)):
            return other.allgather(per_tensor, tensors, opts)
        outputs = [output for outputs in per_tensor for output in outputs]
        return self._make_each(opts, outputs, allgather_tensors, zip(per_tensor, tensors, strict=True))

    @takes(c10d.ReduceScatterOptions, "outputTensor:tensor inputTensor:tensor opts")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks and give each rank its part."""
        return self._make(opts, [output], Communicator.reduce_scatter, output, tensor, opts.reduceOp.op)

    @takes(c10d.ReduceOptions, "tensors:list opts", "tensor root:rank op timeout")
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce a tensor into that of one rank."""
        return self._make(opts, tensors, Communicator.reduce, only(tensors), opts.rootRank, opts.reduceOp.op)

    @takes(
        c10d.GatherOptions,
        "output_tensors:lists input_tensors:list opts",
        "output_tensors:list input_tensor:tensor root:rank timeout",
    )
    def gather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather a tensor of all ranks into a list on one of them."""
        outputs = only(output_lists) if output_lists else []
        return self._make(opts, outputs, gather_tensors, only(tensors), outputs, opts.rootRank)

    @takes(c10d.GatherOptions, "output:tensor input:tensor opts")
    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Gather a tensor of all ranks into one output on one of them; torch has it from 2.15 on."""
        target = output if opts.rootRank == self.members.rank else None
        return self._make(opts, [output], Communicator.gather, target, tensor, opts.rootRank)

    @takes(
        c10d.ScatterOptions,
        "output_tensors:list input_tensors:lists opts",
        "output_tensor:tensor input_tensors:list root:rank timeout",
    )
    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """Give each rank its tensor of the list of one of them."""
        parts = only(input_lists) if input_lists else []
        return self._make(opts, outputs, scatter_tensors, only(outputs), parts, opts.rootRank)

    @takes(c10d.AllToAllOptions, "output_tensors:list input_tensors:list opts")
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Send one tensor to each rank and receive one from each; sizes may differ."""
        return self._make(opts, outputs, alltoall_tensors, outputs, tensors)

    @hookable
    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive the next message of any rank; ``_source_rank()`` of the work says which one sent it."""
        return self._message("recv_anysource", self._starter.messages.recv_any, tensors, tag)

    def _message(self, name: str, call: Callable[..., Any], tensors: list[Tensor], tag: int, *peer: int) -> Any:
        """Make ``call``, the method ``name`` of other backends, with the only one of ``tensors``."""
        tensor = only(tensors)
        if other := self._starter.elsewhere(tensor, tag):
            return getattr(other, name)([tensor], *peer, tag)
        return self._starter.start(_MESSAGE, [tensor], [partial(call, tensor, *peer)], is_message=True)

    # Several calls as one work.

    def _start_coalescing(self, device: torch.device) -> None:
        self._starter.start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._starter.end_coalescing(device)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    if not HAS_HOOKS:  # A call that passes through C++ would find these there, and begin anew.
        allgather_into_tensor_coalesced = all_gather_single_coalesced
        reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
        alltoall_base = all_to_all_single
    gather_into_tensor = gather_single


_open_groups: weakref.WeakSet[TorchGroup] = weakref.WeakSet()


def leave_at_exit(group: TorchGroup) -> None:
    """Shut ``group`` down when this process ends, if it is open by then."""
    _open_groups.add(group)
    _register_exit(os.getpid())


@cache
def _register_exit(process: int) -> None:
    atexit.register(_leave_all, process)


def _leave_all(process: int) -> None:
    if process == os.getpid():
        for group in list(_open_groups):
            group.shutdown()
