"""What ``torch.distributed`` holds for a group of backend ``bagua``: its calls, made on a communicator of ours.

C++ calls eleven of these methods by name (DDP, functional collectives). One that is missing falls through to C++, which
holds the interpreter's lock while it waits: a deadlock. So all of them are here, in the spelling of each version.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from bagua.comm.lifetime.forks import leak
from bagua.comm.operands import check_rank
from bagua.comm.startup.choice import TORCH_NAME
from bagua.comm.torch_backend.forms import takes
from bagua.comm.torch_backend.starter import CallStarter
from bagua.comm.torch_backend.tensors import REDUCE_ROWS, as_one, first, only, require_equal, rows_of, spelled
from bagua.comm.torch_forms.lists import counts_of_rows, rows_for
from bagua.comm.torch_forms.lists import flat as flat_of
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.errors import ConfigurationError, InvalidReduceOpError

_GLOO = dist.ProcessGroup.BackendType.GLOO
_NCCL = dist.ProcessGroup.BackendType.NCCL
#: Messages have no options of their own; these say asynchronous, and the group's deadline.
_MESSAGE = c10d.BarrierOptions()


class TorchGroup(dist.ProcessGroup):
    """A group of ``torch.distributed``, with CPU tensors travelling by our transports.

    Args:
        store: key-value store of the ranks of this group alone.
        starter: makes its calls, and ends with it.
    """

    def __init__(self, store: dist.Store, starter: CallStarter) -> None:
        super().__init__(starter.members.rank, starter.members.size)  # type: ignore[call-arg]  # not in the stub
        #: For all who meet the ranks of this group.
        self.store_of_members = store
        self.members = starter.members
        self._starter = starter

    def register(self) -> None:
        """Give torch the backends that it asks for by device."""
        self._set_default_backend(_GLOO)
        for device_type, backend in self._starter.torch_backends.items():
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
        self._starter.abort("torch.distributed aborted the group")

    def shutdown(self) -> None:
        """Leave the group and give back what it holds. Idempotent."""
        open_groups.discard(self)
        self._starter.shutdown()

    # What C++ calls.

    @takes(c10d.AllreduceOptions, ("list",), "tensors:list opts", "tensors:list op timeout", "tensor op timeout")
    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce in place; several tensors of one call with each other, too."""
        if len(tensors) != 1:
            return self._allreduce_together(tensors, opts)
        if other := self._starter.elsewhere(tensors[0]):
            return other.allreduce(tensors, opts)
        call = partial(self._starter.collectives.allreduce, tensors[0], opts.reduceOp.op)
        started = self._starter.start(opts, tensors, [call])
        self._starter.raise_in_backward(started)
        return started

    def _allreduce_together(self, tensors: list[Tensor], opts: Any) -> Any:
        if other := self._starter.elsewhere(first(tensors)):
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

        call = partial(self._starter.collectives.allreduce, rows, operation)
        return self._starter.start(opts, tensors, [call], finish)

    @takes(c10d.AllreduceCoalescedOptions, ("list",), "tensors:list opts")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce all tensors in place, with one message for each dtype."""
        if tensors and (other := self._starter.elsewhere(tensors[0])):
            return other.allreduce_coalesced(tensors, opts)
        alike: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault(tensor.dtype, []).append(tensor)
        flats = [(flat_of(parts), parts) for parts in alike.values()]

        def finish() -> None:
            for flat, parts in flats:
                copy_pieces(parts, torch.split(flat, [part.numel() for part in parts]))

        operation = opts.reduceOp.op
        calls = [partial(self._starter.collectives.allreduce, flat, operation) for flat, _ in flats]
        return self._starter.start(opts, tensors, calls, finish)

    @takes(c10d.BroadcastOptions, ("list",), "tensors:list opts", "tensor root:rank timeout")
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        """Copy the tensor of one rank to all others; of several, one to all of them."""
        if other := self._starter.elsewhere(first(tensors)):
            return other.broadcast(tensors, opts)
        if len(tensors) == 1:
            call = partial(self._starter.collectives.broadcast, tensors[0], opts.rootRank)
            return self._starter.start(opts, tensors, [call])
        rows = rows_of(tensors)
        sent = rows[check_rank(opts.rootTensor, len(tensors), "rootTensor")]

        def finish() -> None:
            copy_pieces(tensors, [sent] * len(tensors))

        call = partial(self._starter.collectives.broadcast, sent, opts.rootRank)
        return self._starter.start(opts, tensors, [call], finish)

    @takes(
        c10d.AllgatherOptions,
        ("lists", "list"),
        "output_tensors:lists input_tensors:list opts",
        "output_tensors:list input_tensor:tensor timeout",
    )
    def allgather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather the tensors of all ranks into a list, in rank order; of several, all into each list."""
        if other := self._starter.elsewhere(first(tensors)):
            return other.allgather(output_lists, tensors, opts)
        require_equal("output lists, one for each tensor", len(tensors), len(output_lists))
        for outputs in output_lists:
            require_equal("output tensors", len(tensors) * self.members.size, len(outputs))
        flat = rows_for([output for outputs in output_lists for output in outputs])[: len(output_lists[0])]
        source = tensors[0] if len(tensors) == 1 else rows_of(tensors)

        def finish() -> None:
            for outputs in output_lists:
                copy_pieces(outputs, flat.unbind())

        outputs = [output for outputs in output_lists for output in outputs]
        return self._starter.start(opts, outputs, [partial(self._starter.collectives.allgather, flat, source)], finish)

    @takes(c10d.AllgatherOptions, ("list", "list"), "outputs:list inputs:list opts")
    def all_gather_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Gather each tensor of all ranks into one output."""
        if tensors and (other := self._starter.elsewhere(tensors[0])):
            return as_one(other, spelled(other, "all_gather_single", "_allgather_base"), outputs, tensors, opts)
        require_equal("output tensors", len(tensors), len(outputs))
        pairs = zip(outputs, tensors, strict=True)
        calls = [partial(self._starter.collectives.allgather, *pair) for pair in pairs]
        return self._starter.start(opts, outputs, calls)

    @takes(
        c10d.ReduceScatterOptions,
        ("list", "lists"),
        "output_tensors:list input_tensors:lists opts",
        "output:tensor input:list op timeout",
    )
    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """Reduce a list of tensors over all ranks and give each rank its part."""
        output, parts = only(outputs), only(input_lists)
        if other := self._starter.elsewhere(output):
            return other.reduce_scatter(outputs, input_lists, opts)
        require_equal("input tensors", self.members.size, len(parts))
        call = partial(self._starter.collectives.reduce_scatter, output, flat_of(parts), opts.reduceOp.op)
        return self._starter.start(opts, outputs, [call])

    @takes(c10d.ReduceScatterOptions, ("list", "list"), "outputs:list inputs:list opts")
    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Reduce each tensor over all ranks and give each rank its part."""
        if outputs and (other := self._starter.elsewhere(outputs[0])):
            return as_one(
                other, spelled(other, "reduce_scatter_single", "_reduce_scatter_base"), outputs, tensors, opts
            )
        require_equal("input tensors", len(outputs), len(tensors))
        pairs = zip(outputs, tensors, strict=True)
        calls = [partial(self._starter.collectives.reduce_scatter, *pair, opts.reduceOp.op) for pair in pairs]
        return self._starter.start(opts, outputs, calls)

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
        if other := self._starter.elsewhere(tensor):
            call = spelled(other, "all_to_all_single", "alltoall_base")
            return call(output, tensor, list(output_sizes), list(input_sizes), opts)
        if not output_sizes and not input_sizes:
            return self._starter.start(opts, [output], [partial(self._starter.collectives.alltoall, output, tensor)])
        received = counts_of_rows(output, output_sizes, self.members.size)
        sent = counts_of_rows(tensor, input_sizes, self.members.size)
        call = partial(self._starter.collectives.alltoall_v, output, tensor, received, sent)
        return self._starter.start(opts, [output], [call])

    @takes(c10d.BarrierOptions, (), "opts", "timeout")
    def barrier(self, opts: Any) -> Any:
        """Return when all ranks are here; a barrier of the devices if the caller names them."""
        if opts.device_ids and (other := self._starter.torch_backends.get("cuda")):
            return other.barrier(opts)
        return self._starter.start(opts, [], [self._starter.collectives.barrier])

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Any:  # noqa: N803 - torch's name
        """Send a tensor to one rank."""
        tensor = only(tensors)
        if other := self._starter.elsewhere(tensor, tag):
            return other.send([tensor], dstRank, tag)
        call = partial(self._starter.messages.send, tensor, dstRank)
        return self._starter.start(_MESSAGE, [tensor], [call], is_message=True)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Any:  # noqa: N803 - torch's name
        """Receive a tensor from one rank."""
        tensor = only(tensors)
        if other := self._starter.elsewhere(tensor, tag):
            return other.recv([tensor], srcRank, tag)
        call = partial(self._starter.messages.recv, tensor, srcRank)
        return self._starter.start(_MESSAGE, [tensor], [call], is_message=True)

    # What Python calls.

    @takes(c10d.AllgatherOptions, ("tensor", "tensor"), "output:tensor input:tensor opts")
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Gather a tensor of all ranks into one output."""
        if other := self._starter.elsewhere(tensor):
            return spelled(other, "all_gather_single", "_allgather_base")(output, tensor, opts)
        return self._starter.start(opts, [output], [partial(self._starter.collectives.allgather, output, tensor)])

    @takes(c10d.AllgatherOptions, ("lists", "list"), "output_lists:lists input_list:list opts")
    def allgather_coalesced(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather several tensors; here ``output_lists`` has one list for each rank."""
        require_equal("output lists, one for each rank", self.members.size, len(output_lists))
        for outputs in output_lists:
            require_equal("output tensors", len(tensors), len(outputs))
        per_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        if other := self._starter.elsewhere(first(tensors)):
            return other.allgather(per_tensor, tensors, opts)
        flats = [rows_for(outputs) for outputs in per_tensor]
        calls = [partial(self._starter.collectives.allgather, *pair) for pair in zip(flats, tensors, strict=True)]

        def finish() -> None:
            for outputs, flat in zip(per_tensor, flats, strict=True):
                copy_pieces(outputs, flat.unbind())

        return self._starter.start(opts, [output for outputs in per_tensor for output in outputs], calls, finish)

    @takes(c10d.ReduceScatterOptions, ("tensor", "tensor"), "outputTensor:tensor inputTensor:tensor opts")
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Reduce a tensor over all ranks and give each rank its part."""
        if other := self._starter.elsewhere(tensor):
            return spelled(other, "reduce_scatter_single", "_reduce_scatter_base")(output, tensor, opts)
        call = partial(self._starter.collectives.reduce_scatter, output, tensor, opts.reduceOp.op)
        return self._starter.start(opts, [output], [call])

    @takes(c10d.ReduceOptions, ("list",), "tensors:list opts", "tensor root:rank op timeout")
    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce a tensor into that of one rank."""
        tensor = only(tensors)
        if other := self._starter.elsewhere(tensor):
            return other.reduce(tensors, opts)
        call = partial(self._starter.collectives.reduce, tensor, opts.rootRank, opts.reduceOp.op)
        return self._starter.start(opts, tensors, [call])

    @takes(
        c10d.GatherOptions,
        ("lists", "list"),
        "output_tensors:lists input_tensors:list opts",
        "output_tensors:list input_tensor:tensor root:rank timeout",
    )
    def gather(self, output_lists: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Any:
        """Gather a tensor of all ranks into a list on one of them."""
        tensor = only(tensors)
        if other := self._starter.elsewhere(tensor):
            return other.gather(output_lists, tensors, opts)
        outputs = only(output_lists) if output_lists else []
        at_root = opts.rootRank == self.members.rank
        require_equal("output tensors", self.members.size if at_root else 0, len(outputs))
        flat = rows_for(outputs) if outputs else None

        def finish() -> None:
            if flat is not None:
                copy_pieces(outputs, flat.unbind())

        call = partial(self._starter.collectives.gather, flat, tensor, opts.rootRank)
        return self._starter.start(opts, outputs, [call], finish)

    @takes(c10d.GatherOptions, ("tensor", "tensor"), "output:tensor input:tensor opts")
    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        """Gather a tensor of all ranks into one output on one of them; torch has it from 2.15 on."""
        if other := self._starter.elsewhere(tensor):
            return other.gather_single(output, tensor, opts)
        target = output if opts.rootRank == self.members.rank else None
        call = partial(self._starter.collectives.gather, target, tensor, opts.rootRank)
        return self._starter.start(opts, [output], [call])

    @takes(
        c10d.ScatterOptions,
        ("list", "lists"),
        "output_tensors:list input_tensors:lists opts",
        "output_tensor:tensor input_tensors:list root:rank timeout",
    )
    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> Any:
        """Give each rank its tensor of the list of one of them."""
        output = only(outputs)
        if other := self._starter.elsewhere(output):
            return other.scatter(outputs, input_lists, opts)
        parts = only(input_lists) if input_lists else []
        at_root = opts.rootRank == self.members.rank
        require_equal("input tensors", self.members.size if at_root else 0, len(parts))
        source = flat_of(parts) if parts else None
        call = partial(self._starter.collectives.scatter, output, source, opts.rootRank)
        return self._starter.start(opts, outputs, [call])

    @takes(c10d.AllToAllOptions, ("list", "list"), "output_tensors:list input_tensors:list opts")
    def alltoall(self, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
        """Send one tensor to each rank and receive one from each; sizes may differ."""
        if other := self._starter.elsewhere(first(tensors)):
            return other.alltoall(outputs, tensors, opts)
        require_equal("output tensors", self.members.size, len(outputs))
        require_equal("input tensors", self.members.size, len(tensors))
        received, sent = [output.numel() for output in outputs], [tensor.numel() for tensor in tensors]
        flat = outputs[0].new_empty(sum(received))
        call = partial(self._starter.collectives.alltoall_v, flat, flat_of(tensors), received, sent)
        return self._starter.start(opts, outputs, [call], lambda: copy_pieces(outputs, torch.split(flat, received)))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive the next message of any rank; ``_source_rank()`` of the work says which one sent it."""
        tensor = only(tensors)
        if other := self._starter.elsewhere(tensor, tag):
            return other.recv_anysource([tensor], tag)
        receive: Any = self._starter.messages.recv_any  # It returns a rank, or as here a work.
        return self._starter.start(_MESSAGE, [tensor], [partial(receive, tensor)], is_message=True)

    # Several calls as one work.

    def _start_coalescing(self, device: torch.device) -> None:
        self._starter.start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._starter.end_coalescing(device)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single


class OpenGroups:
    """The open groups of this process, to be left when it ends."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[TorchGroup] = weakref.WeakSet()
        self._process = -1

    def add(self, group: TorchGroup) -> None:
        """Leave ``group`` at the end of the process."""
        self._members.add(group)
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._leave_all)

    def discard(self, group: TorchGroup) -> None:
        """Forget ``group``, which was left."""
        self._members.discard(group)

    def _leave_all(self) -> None:
        if self._process == os.getpid():
            for group in list(self._members):
                group.shutdown()


open_groups = OpenGroups()
