"""Torch's calls on a process group, made on a communicator of ours.

C++ calls eleven of these methods by name (DDP, functional collectives). One that is missing
falls through to a C++ method that holds the interpreter's lock while it waits: a deadlock.
So all of them are here, in today's spelling and in the one before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bagua.comm.arguments import as_seconds
from bagua.comm.communicator import Communicator
from bagua.comm.copying import copy_pieces
from bagua.comm.group import ProcessGroup
from bagua.comm.torch_backend_futures import CallbackThread, in_callback
from bagua.comm.torch_backend_work import BackwardWatch, TorchWork
from bagua.comm.torch_private import end_coalescing, lazy_gloo_options, start_coalescing
from bagua.comm.work import JoinedWork, Work
from bagua.errors import ConfigurationError, InvalidTensorError

__all__ = ["CpuStandIn", "TorchCalls"]


class Options(Protocol):
    """What the options of all calls of torch have."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815 - torch's name


class CpuStandIn(dist.ProcessGroupGloo):
    """What torch finds registered for CPU tensors, because it asks groups for that.

    It also does what our transports do not: sparse tensors, and messages with a tag. It
    connects when it is first used, so it costs nothing until then.

    Args:
        store: of its group alone.
        rank: of this process.
        size: number of ranks.
        timeout: default deadline of the calls of its group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, lazy_gloo_options(timeout))
        self.timeout_s = timeout.total_seconds()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Where torch leaves a new timeout for the group."""
        self.timeout_s = as_seconds(timeout)
        super()._set_default_timeout(timeout)


class TorchCalls:
    """The methods of a group of ``torch.distributed``, with CPU tensors travelling by our transports.

    Args:
        members: our group of the same ranks.
        stand_in: registered with torch for CPU tensors.
        backends: who serves the tensors of other devices, by device type.
    """

    def __init__(self, members: ProcessGroup, stand_in: CpuStandIn, backends: Mapping[str, Any]) -> None:
        self.members = members
        self._communicator = members.global_communicator
        self._stand_in = stand_in
        self._backends = dict(backends)
        self._communicator.share()  # Threads may share a group of torch.
        self._backward = BackwardWatch()
        self.callbacks = CallbackThread(f"bagua-{members.label}-callbacks")
        #: Connected by the first collective call in a callback.
        self._nested: Communicator | None = None
        self._nesting = threading.RLock()
        #: Started calls that will be one work, by the thread that collects them.
        self._coalesced: dict[int, list[Work]] = {}

    # Starting calls.

    @property
    def _collectives(self) -> Communicator:
        """Who makes the collective calls of the calling thread.

        Those in callbacks have a communicator of their own: ranks do not agree on the moment at which a
        callback runs, so not on the order of its calls and those of other threads.
        """
        if not in_callback():
            return self._communicator
        with self._nesting:
            if self._nested is None:
                everyone = range(self.members.size)
                self._nested = self.members.connect(everyone, "callbacks", timeout_s=self._stand_in.timeout_s)
                self._nested.share()
            return self._nested

    def _elsewhere(self, tensor: Tensor, tag: int = 0) -> Any:
        """Who takes calls with this tensor instead of our communicator, if anybody."""
        if tensor.is_cpu:
            return self._stand_in if tag or tensor.layout is torch.sparse_coo else None
        try:
            return self._backends[tensor.device.type]
        except KeyError:
            raise InvalidTensorError(
                "backend bagua does not serve this device",
                argument="tensor",
                expected=f"a tensor on {' or '.join(['cpu', *self._backends])}",
                seen=tensor.device,
                advice="CUDA tensors need a build of torch with NCCL, and a GPU.",
            ) from None

    def _start(
        self,
        options: Options,
        outputs: Sequence[Tensor],
        calls: Sequence[Callable[..., Work | None]],
        finish: Callable[[], None] | None = None,
        *,
        is_message: bool = False,
    ) -> TorchWork:
        """Start ``calls`` of our communicator as torch's options say.

        Those that are not asynchronous are made here and now, mostly in the calling thread: on
        shared memory that takes a fraction of the time.
        """
        seconds = options.timeout.total_seconds()
        timeout_s = seconds if seconds > 0 else self._stand_in.timeout_s
        started = [call(async_op=options.asyncOp, timeout=timeout_s) for call in calls]
        works = [work for work in started if work is not None]
        if not works:
            if finish is not None:
                finish()
            return TorchWork(None, outputs, self.callbacks)
        work = works[0] if finish is None and len(works) == 1 else JoinedWork(works, finish)
        if self._coalesced and (collected := self._coalesced.get(threading.get_ident())) is not None:
            collected.append(work)
        return TorchWork(work, outputs, self.callbacks, is_message=is_message)

    # What C++ calls.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor in place."""
        opts = opts or c10d.AllreduceOptions()
        if other := self._elsewhere(tensors[0]):
            return other.allreduce(tensors, opts)
        operation = opts.reduceOp.op
        started = self._start(opts, tensors, [partial(self._collectives.allreduce, t, operation) for t in tensors])
        if started.pending is not None:
            self._backward.add(started.pending)
        return started

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce all tensors in place, with one message for each dtype."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        if tensors and (other := self._elsewhere(tensors[0])):
            return other.allreduce_coalesced(tensors, opts)
        alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault(tensor.dtype, []).append(tensor)
        flats = [(_flat(parts), parts) for parts in alike.values()]

        def finish() -> None:
            for flat, parts in flats:
                copy_pieces(parts, torch.split(flat, [part.numel() for part in parts]))

        operation = opts.reduceOp.op
        calls = [partial(self._collectives.allreduce, flat, operation) for flat, _ in flats]
        return self._start(opts, tensors, calls, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Copy the tensors of one rank to all others."""
        opts = opts or c10d.BroadcastOptions()
        if other := self._elsewhere(tensors[0]):
            return other.broadcast(tensors, opts)
        calls = [partial(self._collectives.broadcast, tensor, opts.rootRank) for tensor in tensors]
        return self._start(opts, tensors, calls)

    def allgather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        """Gather each tensor of all ranks into a list of tensors, in rank order."""
        opts = opts or c10d.AllgatherOptions()
        if other := self._elsewhere(tensors[0]):
            return other.allgather(output_lists, tensors, opts)
        flats = [_rows_for(outputs) for outputs in output_lists]
        calls = [partial(self._collectives.allgather, *pair) for pair in zip(flats, tensors, strict=True)]

        def finish() -> None:
            for outputs, flat in zip(output_lists, flats, strict=True):
                copy_pieces(outputs, flat.unbind())

        return self._start(opts, [output for outputs in output_lists for output in outputs], calls, finish)

    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        """Gather each tensor of all ranks into one output."""
        opts = opts or c10d.AllgatherOptions()
        if tensors and (other := self._elsewhere(tensors[0])):
            return _as_one(other, _spelled(other, "all_gather_single", "_allgather_base"), outputs, tensors, opts)
        pairs = zip(outputs, tensors, strict=True)
        return self._start(opts, outputs, [partial(self._collectives.allgather, *pair) for pair in pairs])

    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any = None) -> Any:
        """Reduce lists of tensors over all ranks and give each rank its part."""
        opts = opts or c10d.ReduceScatterOptions()
        if other := self._elsewhere(outputs[0]):
            return other.reduce_scatter(outputs, input_lists, opts)
        pairs = zip(outputs, map(_flat, input_lists), strict=True)
        calls = [partial(self._collectives.reduce_scatter, *pair, opts.reduceOp.op) for pair in pairs]
        return self._start(opts, outputs, calls)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each tensor over all ranks and give each rank its part."""
        opts = opts or c10d.ReduceScatterOptions()
        if outputs and (other := self._elsewhere(outputs[0])):
            return _as_one(
                other, _spelled(other, "reduce_scatter_single", "_reduce_scatter_base"), outputs, tensors, opts
            )
        pairs = zip(outputs, tensors, strict=True)
        calls = [partial(self._collectives.reduce_scatter, *pair, opts.reduceOp.op) for pair in pairs]
        return self._start(opts, outputs, calls)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] = (),
        input_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """Send some of the first dimension to each rank; the same to each if no sizes are given."""
        opts = opts or c10d.AllToAllOptions()
        if other := self._elsewhere(tensor):
            call = _spelled(other, "all_to_all_single", "alltoall_base")
            return call(output, tensor, list(output_sizes), list(input_sizes), opts)
        if not output_sizes and not input_sizes:
            return self._start(opts, [output], [partial(self._collectives.alltoall, output, tensor)])
        received = _counts(output, output_sizes, self._communicator.size)
        sent = _counts(tensor, input_sizes, self._communicator.size)
        return self._start(opts, [output], [partial(self._collectives.alltoall_v, output, tensor, received, sent)])

    def barrier(self, opts: Any = None) -> Any:
        """Return when all ranks are here; a barrier of the devices if the caller names them."""
        opts = opts or c10d.BarrierOptions()
        if opts.device_ids and "cuda" in self._backends:
            return self._backends["cuda"].barrier(opts)
        return self._start(opts, [], [self._collectives.barrier])

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Any:
        """Send tensors to one rank."""
        if other := self._elsewhere(tensors[0], tag):
            return other.send(tensors, dst, tag)
        calls = [partial(self._communicator.send, tensor, dst) for tensor in tensors]
        return self._start(_MESSAGE, tensors, calls, is_message=True)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Any:
        """Receive tensors from one rank."""
        if other := self._elsewhere(tensors[0], tag):
            return other.recv(tensors, src, tag)
        calls = [partial(self._communicator.recv, tensor, src) for tensor in tensors]
        return self._start(_MESSAGE, tensors, calls, is_message=True)

    # What Python calls.

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Gather a tensor of all ranks into one output."""
        opts = opts or c10d.AllgatherOptions()
        if other := self._elsewhere(tensor):
            return _spelled(other, "all_gather_single", "_allgather_base")(output, tensor, opts)
        return self._start(opts, [output], [partial(self._collectives.allgather, output, tensor)])

    def allgather_coalesced(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        """Gather several tensors; here ``output_lists`` has one list for each rank."""
        per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return self.allgather(per_tensor, tensors, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Reduce a tensor over all ranks and give each rank its part."""
        opts = opts or c10d.ReduceScatterOptions()
        if other := self._elsewhere(tensor):
            return _spelled(other, "reduce_scatter_single", "_reduce_scatter_base")(output, tensor, opts)
        call = partial(self._collectives.reduce_scatter, output, tensor, opts.reduceOp.op)
        return self._start(opts, [output], [call])

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce tensors into those of one rank."""
        opts = opts or c10d.ReduceOptions()
        if other := self._elsewhere(tensors[0]):
            return other.reduce(tensors, opts)
        operation = opts.reduceOp.op
        calls = [partial(self._collectives.reduce, tensor, opts.rootRank, operation) for tensor in tensors]
        return self._start(opts, tensors, calls)

    def gather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        """Gather a tensor of all ranks into a list on one of them."""
        opts = opts or c10d.GatherOptions()
        if other := self._elsewhere(tensors[0]):
            return other.gather(output_lists, tensors, opts)
        outputs = output_lists[0] if output_lists else []
        flat = _rows_for(outputs) if outputs else None

        def finish() -> None:
            if flat is not None:
                copy_pieces(outputs, flat.unbind())

        return self._start(opts, outputs, [partial(self._collectives.gather, flat, tensors[0], opts.rootRank)], finish)

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any = None) -> Any:
        """Give each rank its tensor of the list of one of them."""
        opts = opts or c10d.ScatterOptions()
        if other := self._elsewhere(outputs[0]):
            return other.scatter(outputs, input_lists, opts)
        parts = _flat(input_lists[0]) if input_lists else None
        return self._start(opts, outputs, [partial(self._collectives.scatter, outputs[0], parts, opts.rootRank)])

    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        """Send one tensor to each rank and receive one from each; sizes may differ."""
        opts = opts or c10d.AllToAllOptions()
        if other := self._elsewhere(tensors[0]):
            return other.alltoall(outputs, tensors, opts)
        received, sent = [output.numel() for output in outputs], [tensor.numel() for tensor in tensors]
        flat = outputs[0].new_empty(sum(received))
        call = partial(self._collectives.alltoall_v, flat, _flat(tensors), received, sent)
        return self._start(opts, outputs, [call], lambda: copy_pieces(outputs, torch.split(flat, received)))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Refuse: our transports match messages by their sender."""
        if other := self._elsewhere(tensors[0], tag):
            return other.recv_anysource(tensors, tag)
        raise ConfigurationError(
            "backend bagua receives from one rank at a time",
            argument="src",
            expected="the rank that sends",
            seen=None,
            advice="Name it, or give both sides a tag other than 0: such messages go through Gloo.",
        )

    # Several calls as one work.

    def _start_coalescing(self, device: torch.device) -> None:
        backend = self._backends.get(device.type)
        if backend is not None:
            start_coalescing(backend)
        else:
            self._coalesced[threading.get_ident()] = []

    def _end_coalescing(self, device: torch.device) -> Any:
        backend = self._backends.get(device.type)
        if backend is not None:
            return end_coalescing(backend)
        works = self._coalesced.pop(threading.get_ident(), None)
        # Messages may be among them.
        return TorchWork(JoinedWork(works, None) if works else None, [], self.callbacks, is_message=True)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


#: Messages have no options of their own; these say asynchronous, and the group's deadline.
_MESSAGE = c10d.BarrierOptions()


def _spelled(backend: Any, name: str, former: str) -> Callable[..., Any]:
    """A method that torch has renamed."""
    method: Callable[..., Any] = getattr(backend, name, None) or getattr(backend, former)
    return method


def _as_one(backend: Any, call: Callable[..., Any], outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
    """Several calls of one kind as one work; a backend has no methods for that in Python."""
    start_coalescing(backend)
    for output, tensor in zip(outputs, tensors, strict=True):
        call(output, tensor, opts)
    return end_coalescing(backend)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """All elements of ``parts``, one after the other, in new memory."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _rows_for(outputs: Sequence[Tensor]) -> Tensor:
    """Memory for what all ranks send, a row for each output."""
    kinds = {(output.numel(), output.dtype) for output in outputs}
    if len(kinds) != 1:
        raise InvalidTensorError(
            "the outputs of one gather must be alike",
            argument="output tensors",
            expected="a list of tensors of one size and dtype",
            seen=[(tuple(output.shape), output.dtype) for output in outputs],
        )
    return outputs[0].new_empty(len(outputs), outputs[0].numel())


def _counts(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """How many elements are in the given rows for each rank; none given means equal shares."""
    width = math.prod(tensor.shape[1:])
    return [count * width for count in rows or [len(tensor) // size] * size]
