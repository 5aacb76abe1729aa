"""Every form in which torch's groups take their arguments, for any backend. Functions run on each rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ROOT = 1
SOON = timedelta(seconds=20)


def tensors_of(count: int, numel: int = 3) -> list[torch.Tensor]:
    """Other values for each tensor of each rank."""
    return [torch.arange(numel, dtype=torch.float32) + 10 * i + 100 * (dist.get_rank() + 1) for i in range(count)]


def own() -> torch.Tensor:
    return tensors_of(1)[0]


def each(count: int = 0) -> list[torch.Tensor]:
    """One for each rank, to be received."""
    return [torch.zeros(3) for _ in range(count or dist.get_world_size())]


def at_root(tensors: list[Any]) -> list[Any]:
    return tensors if dist.get_rank() == ROOT else []


def with_fields(options: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def in_place(call: Callable[[Any, Any], Any], count: int = 1, as_list: bool = False) -> Callable[[Any], Any]:
    """``call(group, tensors)``; the result is what the tensors are afterwards."""

    def run(group: Any) -> Any:
        tensors = tensors_of(count)
        call(group, tensors if as_list or count > 1 else tensors[0]).wait()
        return tensors

    return run


def into(outputs: Callable[[], Any], call: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """``call(group, outputs)``; the result is what the outputs are afterwards."""

    def run(group: Any) -> Any:
        received = outputs()
        call(group, received).wait()
        return received

    return run


def reduce_to_root(call: Callable[[Any, Any], Any], as_list: bool = False) -> Callable[[Any], Any]:
    """Gloo spoils the tensors of other ranks."""
    run = in_place(call, as_list=as_list)
    return lambda group: at_root(run(group))


MAX = dist.ReduceOp.MAX
FORMS: dict[str, Callable[[Any], Any]] = {
    "allreduce(tensor)": in_place(lambda g, t: g.allreduce(t)),
    "allreduce(tensor, op)": in_place(lambda g, t: g.allreduce(t, MAX)),
    "allreduce(tensor, op=)": in_place(lambda g, t: g.allreduce(t, op=MAX)),
    "allreduce(tensor=, timeout=)": in_place(lambda g, t: g.allreduce(tensor=t, timeout=SOON)),
    "allreduce(tensor, op, timeout)": in_place(lambda g, t: g.allreduce(t, MAX, SOON)),
    "allreduce([])": in_place(lambda g, t: g.allreduce(t), as_list=True),
    "allreduce([], op)": in_place(lambda g, t: g.allreduce(t, dist.ReduceOp.PRODUCT), as_list=True),
    "allreduce([], ReduceOp())": in_place(lambda g, t: g.allreduce(t, dist.ReduceOp(MAX)), as_list=True),
    "allreduce([], op=, timeout=)": in_place(lambda g, t: g.allreduce(t, op=MAX, timeout=SOON), as_list=True),
    "allreduce([], opts)": in_place(
        lambda g, t: g.allreduce(t, with_fields(c10d.AllreduceOptions(), reduceOp=MAX)), as_list=True
    ),
    "allreduce(tensors=, opts=)": in_place(
        lambda g, t: g.allreduce(tensors=t, opts=with_fields(c10d.AllreduceOptions(), reduceOp=MAX)), as_list=True
    ),
    "allreduce((,))": in_place(lambda g, t: g.allreduce(tuple(t)), as_list=True),
    "allreduce of two": in_place(lambda g, t: g.allreduce(t), count=2),
    "allreduce of three, op": in_place(lambda g, t: g.allreduce(t, MAX), count=3),
    "allreduce_coalesced([])": in_place(lambda g, t: g.allreduce_coalesced(t), count=3),
    "allreduce_coalesced(tensors=, opts=)": in_place(
        lambda g, t: g.allreduce_coalesced(tensors=t, opts=with_fields(c10d.AllreduceCoalescedOptions(), reduceOp=MAX)),
        count=3,
    ),
    "broadcast(tensor, root)": in_place(lambda g, t: g.broadcast(t, ROOT)),
    "broadcast(tensor, 0)": in_place(lambda g, t: g.broadcast(t, 0)),
    "broadcast(tensor, root=, timeout=)": in_place(lambda g, t: g.broadcast(t, root=ROOT, timeout=SOON)),
    "broadcast([])": in_place(lambda g, t: g.broadcast(t), as_list=True),
    "broadcast([], opts)": in_place(
        lambda g, t: g.broadcast(t, with_fields(c10d.BroadcastOptions(), rootRank=ROOT)), as_list=True
    ),
    "broadcast of two": in_place(
        lambda g, t: g.broadcast(t, with_fields(c10d.BroadcastOptions(), rootRank=ROOT, rootTensor=1)), count=2
    ),
    "reduce(tensor, root)": reduce_to_root(lambda g, t: g.reduce(t, ROOT)),
    "reduce(tensor, root, op)": reduce_to_root(lambda g, t: g.reduce(t, ROOT, MAX)),
    "reduce(tensor, root=, op=, timeout=)": reduce_to_root(lambda g, t: g.reduce(t, root=ROOT, op=MAX, timeout=SOON)),
    "reduce([], opts)": reduce_to_root(
        lambda g, t: g.reduce(t, with_fields(c10d.ReduceOptions(), rootRank=ROOT, reduceOp=MAX)), as_list=True
    ),
    "allgather([], tensor)": into(each, lambda g, o: g.allgather(o, own())),
    "allgather(output_tensors=, input_tensor=, timeout=)": into(
        each, lambda g, o: g.allgather(output_tensors=o, input_tensor=own(), timeout=SOON)
    ),
    "allgather([[]], [])": into(each, lambda g, o: g.allgather([o], [own()])),
    "allgather([[]], [], opts)": into(
        each, lambda g, o: g.allgather(output_tensors=[o], input_tensors=[own()], opts=c10d.AllgatherOptions())
    ),
    "allgather of two": into(
        lambda: [each(2 * dist.get_world_size()) for _ in range(2)], lambda g, o: g.allgather(o, tensors_of(2))
    ),
    "allgather_coalesced": into(
        lambda: [each(2) for _ in range(dist.get_world_size())], lambda g, o: g.allgather_coalesced(o, tensors_of(2))
    ),
    "gather([], tensor, root)": into(lambda: at_root(each()), lambda g, o: g.gather(o, own(), ROOT)),
    "gather(output_tensors=, input_tensor=, root=, timeout=)": into(
        lambda: at_root(each()),
        lambda g, o: g.gather(output_tensors=o, input_tensor=own(), root=ROOT, timeout=SOON),
    ),
    "gather([[]], [], opts)": into(
        lambda: at_root(each()),
        lambda g, o: g.gather([o] if o else [], [own()], with_fields(c10d.GatherOptions(), rootRank=ROOT)),
    ),
    "scatter(tensor, [], root)": into(
        lambda: each(1), lambda g, o: g.scatter(o[0], at_root(tensors_of(dist.get_world_size())), ROOT)
    ),
    "scatter(output_tensor=, input_tensors=, root=, timeout=)": into(
        lambda: each(1),
        lambda g, o: g.scatter(
            output_tensor=o[0], input_tensors=at_root(tensors_of(dist.get_world_size())), root=ROOT, timeout=SOON
        ),
    ),
    "scatter([], [[]], opts)": into(
        lambda: each(1),
        lambda g, o: g.scatter(
            o, at_root([tensors_of(dist.get_world_size())]), with_fields(c10d.ScatterOptions(), rootRank=ROOT)
        ),
    ),
    "reduce_scatter(tensor, [])": into(
        lambda: each(1), lambda g, o: g.reduce_scatter(o[0], tensors_of(dist.get_world_size()))
    ),
    "reduce_scatter(output=, input=, op=, timeout=)": into(
        lambda: each(1),
        lambda g, o: g.reduce_scatter(output=o[0], input=tensors_of(dist.get_world_size()), op=MAX, timeout=SOON),
    ),
    "reduce_scatter([], [[]], opts)": into(
        lambda: each(1),
        lambda g, o: g.reduce_scatter(
            o, [tensors_of(dist.get_world_size())], with_fields(c10d.ReduceScatterOptions(), reduceOp=MAX)
        ),
    ),
    "alltoall([], [])": into(each, lambda g, o: g.alltoall(o, tensors_of(dist.get_world_size()))),
    "alltoall(output_tensors=, input_tensors=, opts=)": into(
        each,
        lambda g, o: g.alltoall(
            output_tensors=o, input_tensors=tensors_of(dist.get_world_size()), opts=c10d.AllToAllOptions()
        ),
    ),
    "alltoall_base(tensor, tensor, [], [])": into(
        lambda: torch.zeros(6), lambda g, o: g.alltoall_base(o, torch.arange(6.0) + dist.get_rank(), [], [])
    ),
    "alltoall_base(, timeout=)": into(
        lambda: torch.zeros(6),
        lambda g, o: g.alltoall_base(o, torch.arange(6.0) + dist.get_rank(), [3, 3], [3, 3], timeout=SOON),
    ),
    "all_to_all_single(, opts=)": into(
        lambda: torch.zeros(6),
        lambda g, o: g.all_to_all_single(
            output=o,
            input=torch.arange(6.0) + dist.get_rank(),
            output_split_sizes=[3, 3],
            input_split_sizes=[3, 3],
            opts=c10d.AllToAllOptions(),
        ),
    ),
    "all_gather_single(output=, input=)": into(
        lambda: torch.zeros(6), lambda g, o: g.all_gather_single(output=o, input=own())
    ),
    "_allgather_base": into(
        lambda: torch.zeros(6), lambda g, o: g._allgather_base(o, own(), opts=c10d.AllgatherOptions())
    ),
    "reduce_scatter_single(outputTensor=, inputTensor=)": into(
        lambda: torch.zeros(3), lambda g, o: g.reduce_scatter_single(outputTensor=o, inputTensor=torch.arange(6.0))
    ),
    "_reduce_scatter_base": into(
        lambda: torch.zeros(3), lambda g, o: g._reduce_scatter_base(o, torch.arange(6.0), c10d.ReduceScatterOptions())
    ),
    "allgather_into_tensor_coalesced": into(
        lambda: [torch.zeros(6)], lambda g, o: g.allgather_into_tensor_coalesced(outputs=o, inputs=[own()])
    ),
    "reduce_scatter_tensor_coalesced": into(
        lambda: [torch.zeros(3)], lambda g, o: g.reduce_scatter_tensor_coalesced(outputs=o, inputs=[torch.arange(6.0)])
    ),
    "barrier()": into(list, lambda g, _: g.barrier()),
    "barrier(opts)": into(list, lambda g, _: g.barrier(opts=c10d.BarrierOptions())),
    "barrier(timeout=)": into(list, lambda g, _: g.barrier(timeout=SOON)),
    "send, recv": into(
        lambda: tensors_of(1),
        lambda g, o: (
            g.send(tensors=o, dstRank=1 - dist.get_rank(), tag=0)
            if dist.get_rank() == 0
            else g.recv(tensors=o, srcRank=1 - dist.get_rank(), tag=0)
        ),
    ),
}

#: Refused by Gloo as well, there with errors of their own kinds.
REFUSED: dict[str, Callable[[Any], Any]] = {
    "number for timeout": lambda g: g.allreduce(own(), timeout=5),
    "number for op": lambda g: g.allreduce(own(), 3),
    "float for root": lambda g: g.broadcast(own(), 1.0),
    "no root": lambda g: g.broadcast(own()),
    "options of another call": lambda g: g.allreduce([own()], c10d.BroadcastOptions()),
    "options and more": lambda g: g.allreduce([own()], c10d.AllreduceOptions(), SOON),
    "unknown keyword": lambda g: g.allreduce(own(), root=1),
    "said twice": lambda g: g.allreduce(own(), tensor=own()),
    "nothing": lambda g: g.allreduce(),
    "empty list": lambda g: g.allreduce([]),
    "list of numbers": lambda g: g.allreduce([1.0]),
    "rank out of range": lambda g: g.broadcast(own(), 7),
    "too few outputs": lambda g: g.allgather(each(1), own()),
    "too few lists": lambda g: g.allgather([each(4)], tensors_of(2)),
    "two tensors to reduce": lambda g: g.reduce(tensors_of(2)),
    "too few inputs": lambda g: g.reduce_scatter(own(), tensors_of(1)),
    "two outputs of a reduce_scatter": lambda g: g.reduce_scatter(each(2), [tensors_of(2)] * 2),
    "too few to exchange": lambda g: g.alltoall(each(1), tensors_of(1)),
    "two messages": lambda g: g.send(tensors_of(2), 1 - dist.get_rank(), 0),
}


def results(group: Any) -> dict[str, Any]:
    """What each form gives on this rank."""
    return {name: form(group) for name, form in FORMS.items()}


def refusals(group: Any) -> dict[str, BaseException | None]:
    """What each wrong call raises; what comes after it works as before."""
    raised: dict[str, BaseException | None] = {}
    for name, call in REFUSED.items():
        try:
            call(group)
            raised[name] = None
        except Exception as error:
            raised[name] = error
    return raised
