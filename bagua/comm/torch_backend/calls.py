"""Torch's calls on a process group, made on a communicator of ours.

C++ calls eleven of these methods by name (DDP, functional collectives). One that is missing falls through to C++, which
holds the interpreter's lock while it waits: a deadlock. So all of them are here, in the spelling of each version.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bagua.comm.communicator import Communicator
from bagua.comm.group import ProcessGroup
from bagua.comm.operands import check_rank
from bagua.comm.torch_backend.forms import takes
from bagua.comm.torch_backend.futures import CallbackThread, PlainFutures, in_callback
from bagua.comm.torch_backend.stand_in import CpuStandIn
from bagua.comm.torch_backend.tensors import REDUCE_ROWS, as_one, first, only, require_equal, rows_of, spelled
from bagua.comm.torch_backend.work import BackwardWatch, TorchWork
from bagua.comm.torch_forms.lists import counts_of_rows, rows_for
from bagua.comm.torch_forms.lists import flat as flat_of
from bagua.comm.torch_private import end_coalescing, start_coalescing
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.comm.work import Work, joined
from bagua.errors import InvalidReduceOpError, InvalidTensorError


class Options(Protocol):
    """What the options of all calls of torch have."""

    timeout: timedelta
    asyncOp: bool  # noqa: N815 - torch's name


#: Messages have no options of their own; these say asynchronous, and the group's deadline.
_MESSAGE = c10d.BarrierOptions()


class TorchCalls:
    """The methods of a group of ``torch.distributed``, with CPU tensors travelling by our transports.

    Args:
        members: our group of the same ranks.
        stand_in: registered with torch for CPU tensors.
        backends: who serves the tensors of other devices, by device type.
        raise_in_backward: True if the end of a backward pass raises the errors of its allreduces.
        ordered_callbacks: True if callbacks of futures run in the order of the calls, in a thread of their own.
    """

    def __init__(
        self,
        members: ProcessGroup,
        stand_in: CpuStandIn,
        backends: Mapping[str, Any],
        *,
        raise_in_backward: bool = True,
        ordered_callbacks: bool = True,
    ) -> None:
        self.members = members
        self._communicator = members.global_communicator
        self._stand_in = stand_in
        self._backends = dict(backends)
        self._communicator.share()  # Threads may share a group of torch.
        self._backward = BackwardWatch() if raise_in_backward else None
        self.callbacks: CallbackThread | PlainFutures = (
            CallbackThread(f"bagua-{members.label}-callbacks") if ordered_callbacks else PlainFutures()
        )
        #: Connected by the first collective call in a callback.
        self._nested: Communicator | None = None
        self._nesting = threading.RLock()
        #: Started calls that will be one work, by the thread that collects them.
        self._coalesced: dict[int, list[Work]] = {}
        #: Works of single numbers. With one DDP counts who has not joined; C++ waits for it and keeps no Python alive.
        self._counts: deque[TorchWork] = deque(maxlen=16)

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
        work = works[0] if finish is None and len(works) == 1 else joined(works, finish)
        if self._coalesced and (collected := self._coalesced.get(threading.get_ident())) is not None:
            collected.append(work)
        made = TorchWork(work, outputs, self.callbacks, is_message=is_message)
        if len(outputs) == 1 and outputs[0].numel() == 1:
            self._counts.append(made)
        return made

    # What C++ calls.

    @takes(c10d.AllreduceOptions, ("list",), "tensors:list opts", "tensors:list op timeout", "tensor op timeout")
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce in place; several tensors of one call with each other, too."""
        if len(tensors) != 1:
            return self._allreduce_together(tensors, opts)
        if other := self._elsewhere(tensors[0]):
            return other.allreduce(tensors, opts)
        started = self._start(opts, tensors, [partial(self._collectives.allreduce, tensors[0], opts.reduceOp.op)])
        if started.pending is not None and self._backward is not None:
            self._backward.add(started.pending)
        return started

    def _allreduce_together(self, tensors: list[Tensor], opts: Any) -> Any:
        if other := self._elsewhere(first(tensors)):
            return other.allreduce(tensors, opts)
        operation = opts.reduceOp.op
        try:
            reduce_rows = REDUCE_ROWS[operation]
        except KeyError:
            raise InvalidReduceOpError(
                "several tensors of one allreduce are not reduced with each other in this way",
                argument="op",
                expected=f"one of {', '.join(known.name for known in REDUCE_ROWS)}",
                seen=operation,
                advice="Make a call for each tensor, or allreduce_coalesced.",
            ) from None
        rows = rows_of(tensors)

        def finish() -> None:
            copy_pieces(tensors, [reduce_rows(rows)] * len(tensors))

        return self._start(opts, tensors, [partial(self._collectives.allreduce, rows, operation)], finish)

    @takes(c10d.AllreduceCoalescedOptions, ("list",), "tensors:list opts")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce all tensors in place, with one message for each dtype."""
        if tensors and (other := self._elsewhere(tensors[0])):
            return other.allreduce_coalesced(tensors, opts)
        alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault(tensor.dtype, []).append(tensor)
        flats = [(flat_of(parts), parts) for parts in alike.values()]

        def finish() -> None:
            for flat, parts in flats:
                copy_pieces(parts, torch.split(flat, [part.numel() for part in parts]))

        operation = opts.reduceOp.op
        calls = [partial(self._collectives.allreduce, flat, operation) for flat, _ in flats]
        return self._start(opts, tensors, calls, finish)

    @takes(c10d.BroadcastOptions, ("list",), "tensors:list opts", "tensor root:rank timeout")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy the tensor of one rank to all others; of several, one to all of them."""
        if other := self._elsewhere(first(tensors)):
            return other.broadcast(tensors, opts)
        if len(tensors) == 1:
            return self._start(opts, tensors, [partial(self._collectives.broadcast, tensors[0], opts.rootRank)])
        rows = rows_of(tensors)
        sent = rows[check_rank(opts.rootTensor, len(tensors), "rootTensor")]

        def finish() -> None:
            copy_pieces(tensors, [sent] * len(tensors))

        return self._start(opts, tensors, [partial(self._collectives.broadcast, sent, opts.rootRank)], finish)

    @takes(
        c10d.AllgatherOptions,
        ("lists", "list"),
        "output_tensors:lists input_tensors:list opts",
        "output_tensors:list input_tensor:tensor timeout",
    )
    def allgather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather the tensors of all ranks into a list, in rank order; of several, all into each list."""
        if other := self._elsewhere(first(tensors)):
            return other.allgather(output_lists, tensors, opts)
        require_equal("output lists, one for each tensor", len(tensors), len(output_lists))
        for outputs in output_lists:
            require_equal("output tensors", len(tensors) * self._communicator.size, len(outputs))
        flat = rows_for([output for outputs in output_lists for output in outputs])[: len(output_lists[0])]
        source = tensors[0] if len(tensors) == 1 else rows_of(tensors)

        def finish() -> None:
            for outputs in output_lists:
                copy_pieces(outputs, flat.unbind())

        outputs = [output for outputs in output_lists for output in outputs]
        return self._start(opts, outputs, [partial(self._collectives.allgather, flat, source)], finish)

    @takes(c10d.AllgatherOptions, ("list", "list"), "outputs:list inputs:list opts")
    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Gather each tensor of all ranks into one output."""
        if tensors and (other := self._elsewhere(tensors[0])):
            return as_one(other, spelled(other, "all_gather_single", "_allgather_base"), outputs, tensors, opts)
        require_equal("output tensors", len(tensors), len(outputs))
        pairs = zip(outputs, tensors, strict=True)
        return self._start(opts, outputs, [partial(self._collectives.allgather, *pair) for pair in pairs])

    @takes(
        c10d.ReduceScatterOptions,
        ("list", "lists"),
        "output_tensors:list input_tensors:lists opts",
        "output:tensor input:list op timeout",
    )
    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """Reduce a list of tensors over all ranks and give each rank its part."""
        output, parts = only(outputs), only(input_lists)
        if other := self._elsewhere(output):
            return other.reduce_scatter(outputs, input_lists, opts)
        require_equal("input tensors", self._communicator.size, len(parts))
        call = partial(self._collectives.reduce_scatter, output, flat_of(parts), opts.reduceOp.op)
        return self._start(opts, outputs, [call])

    @takes(c10d.ReduceScatterOptions, ("list", "list"), "outputs:list inputs:list opts")
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Reduce each tensor over all ranks and give each rank its part."""
        if outputs and (other := self._elsewhere(outputs[0])):
            return as_one(
                other, spelled(other, "reduce_scatter_single", "_reduce_scatter_base"), outputs, tensors, opts
            )
        require_equal("input tensors", len(outputs), len(tensors))
        pairs = zip(outputs, tensors, strict=True)
        calls = [partial(self._collectives.reduce_scatter, *pair, opts.reduceOp.op) for pair in pairs]
        return self._start(opts, outputs, calls)

    @takes(
        c10d.AllToAllOptions,
        ("tensor", "tensor", "sizes", "sizes"),
        "output:tensor input:tensor output_split_sizes:sizes input_split_sizes:sizes opts",
        "output:tensor input:tensor output_split_sizes:sizes input_split_sizes:sizes timeout",
    )
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any
    ) -> Any:
        """Send some of the first dimension to each rank; the same to each if no sizes are given."""
        if other := self._elsewhere(tensor):
            call = spelled(other, "all_to_all_single", "alltoall_base")
            return call(output, tensor, list(output_sizes), list(input_sizes), opts)
        if not output_sizes and not input_sizes:
            return self._start(opts, [output], [partial(self._collectives.alltoall, output, tensor)])
        received = counts_of_rows(output, output_sizes, self._communicator.size)
        sent = counts_of_rows(tensor, input_sizes, self._communicator.size)
        return self._start(opts, [output], [partial(self._collectives.alltoall_v, output, tensor, received, sent)])

    @takes(c10d.BarrierOptions, (), "opts", "timeout")
    def barrier(self, opts: Any) -> Any:
        """Return when all ranks are here; a barrier of the devices if the caller names them."""
        if opts.device_ids and "cuda" in self._backends:
            return self._backends["cuda"].barrier(opts)
        return self._start(opts, [], [self._collectives.barrier])

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803 - torch's name
        """Send a tensor to one rank."""
        tensor = only(tensors)
        if other := self._elsewhere(tensor, tag):
            return other.send([tensor], dstRank, tag)
        return self._start(_MESSAGE, [tensor], [partial(self._communicator.send, tensor, dstRank)], is_message=True)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803 - torch's name
        """Receive a tensor from one rank."""
        tensor = only(tensors)
        if other := self._elsewhere(tensor, tag):
            return other.recv([tensor], srcRank, tag)
        return self._start(_MESSAGE, [tensor], [partial(self._communicator.recv, tensor, srcRank)], is_message=True)

    # What Python calls.

    @takes(c10d.AllgatherOptions, ("tensor", "tensor"), "output:tensor input:tensor opts")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Gather a tensor of all ranks into one output."""
        if other := self._elsewhere(tensor):
            return spelled(other, "all_gather_single", "_allgather_base")(output, tensor, opts)
        return self._start(opts, [output], [partial(self._collectives.allgather, output, tensor)])

    @takes(c10d.AllgatherOptions, ("lists", "list"), "output_lists:lists input_list:list opts")
    def allgather_coalesced(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather several tensors; here ``output_lists`` has one list for each rank."""
        require_equal("output lists, one for each rank", self._communicator.size, len(output_lists))
        for outputs in output_lists:
            require_equal("output tensors", len(tensors), len(outputs))
        per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        if other := self._elsewhere(first(tensors)):
            return other.allgather(per_tensor, tensors, opts)
        flats = [rows_for(outputs) for outputs in per_tensor]
        calls = [partial(self._collectives.allgather, *pair) for pair in zip(flats, tensors, strict=True)]

        def finish() -> None:
            for outputs, flat in zip(per_tensor, flats, strict=True):
                copy_pieces(outputs, flat.unbind())

        return self._start(opts, [output for outputs in per_tensor for output in outputs], calls, finish)

    @takes(c10d.ReduceScatterOptions, ("tensor", "tensor"), "outputTensor:tensor inputTensor:tensor opts")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks and give each rank its part."""
        if other := self._elsewhere(tensor):
            return spelled(other, "reduce_scatter_single", "_reduce_scatter_base")(output, tensor, opts)
        call = partial(self._collectives.reduce_scatter, output, tensor, opts.reduceOp.op)
        return self._start(opts, [output], [call])

    @takes(c10d.ReduceOptions, ("list",), "tensors:list opts", "tensor root:rank op timeout")
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce a tensor into that of one rank."""
        tensor = only(tensors)
        if other := self._elsewhere(tensor):
            return other.reduce(tensors, opts)
        call = partial(self._collectives.reduce, tensor, opts.rootRank, opts.reduceOp.op)
        return self._start(opts, tensors, [call])

    @takes(
        c10d.GatherOptions,
        ("lists", "list"),
        "output_tensors:lists input_tensors:list opts",
        "output_tensors:list input_tensor:tensor root:rank timeout",
    )
    def gather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather a tensor of all ranks into a list on one of them."""
        tensor = only(tensors)
        if other := self._elsewhere(tensor):
            return other.gather(output_lists, tensors, opts)
        outputs = only(output_lists) if output_lists else []
        at_root = opts.rootRank == self._communicator.rank
        require_equal("output tensors", self._communicator.size if at_root else 0, len(outputs))
        flat = rows_for(outputs) if outputs else None

        def finish() -> None:
            if flat is not None:
                copy_pieces(outputs, flat.unbind())

        return self._start(opts, outputs, [partial(self._collectives.gather, flat, tensor, opts.rootRank)], finish)

    @takes(c10d.GatherOptions, ("tensor", "tensor"), "output:tensor input:tensor opts")
    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Gather a tensor of all ranks into one output on one of them; torch has it from 2.15 on."""
        if other := self._elsewhere(tensor):
            return other.gather_single(output, tensor, opts)
        target = output if opts.rootRank == self._communicator.rank else None
        return self._start(opts, [output], [partial(self._collectives.gather, target, tensor, opts.rootRank)])

    @takes(
        c10d.ScatterOptions,
        ("list", "lists"),
        "output_tensors:list input_tensors:lists opts",
        "output_tensor:tensor input_tensors:list root:rank timeout",
    )
    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """Give each rank its tensor of the list of one of them."""
        output = only(outputs)
        if other := self._elsewhere(output):
            return other.scatter(outputs, input_lists, opts)
        parts = only(input_lists) if input_lists else []
        at_root = opts.rootRank == self._communicator.rank
        require_equal("input tensors", self._communicator.size if at_root else 0, len(parts))
        source = flat_of(parts) if parts else None
        return self._start(opts, outputs, [partial(self._collectives.scatter, output, source, opts.rootRank)])

    @takes(c10d.AllToAllOptions, ("list", "list"), "output_tensors:list input_tensors:list opts")
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Send one tensor to each rank and receive one from each; sizes may differ."""
        if other := self._elsewhere(first(tensors)):
            return other.alltoall(outputs, tensors, opts)
        require_equal("output tensors", self._communicator.size, len(outputs))
        require_equal("input tensors", self._communicator.size, len(tensors))
        received, sent = [output.numel() for output in outputs], [tensor.numel() for tensor in tensors]
        flat = outputs[0].new_empty(sum(received))
        call = partial(self._collectives.alltoall_v, flat, flat_of(tensors), received, sent)
        return self._start(opts, outputs, [call], lambda: copy_pieces(outputs, torch.split(flat, received)))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive the next message of any rank; ``_source_rank()`` of the work says which one sent it."""
        tensor = only(tensors)
        if other := self._elsewhere(tensor, tag):
            return other.recv_anysource([tensor], tag)
        receive: Any = self._communicator.recv_any  # It returns a rank, or as here a work.
        return self._start(_MESSAGE, [tensor], [partial(receive, tensor)], is_message=True)

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
        return TorchWork(joined(works, None) if works else None, [], self.callbacks, is_message=True)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single
