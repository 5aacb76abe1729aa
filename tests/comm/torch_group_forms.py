"""Every form in which torch's groups take their arguments, for any backend. Functions run on each of two ranks."""

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

ROOT = 1
SOON = timedelta(seconds=20)


def tensors_of(count: int) -> list[torch.Tensor]:
    """Other values for each tensor of each rank."""
    return [torch.arange(3.0) + 10 * i + 100 * (dist.get_rank() + 1) for i in range(count)]


def own() -> torch.Tensor:
    return tensors_of(1)[0]


def numbers() -> torch.Tensor:
    return torch.arange(6.0) + dist.get_rank()


def each(count: int = 2) -> list[torch.Tensor]:
    """One for each rank, to be received."""
    return [torch.zeros(3) for _ in range(count)]


def at_root(tensors: list[Any]) -> list[Any]:
    return tensors if dist.get_rank() == ROOT else []


def options(kind: Callable[[], Any], **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def meet(group: Any, tensors: list[torch.Tensor]) -> Any:
    if dist.get_rank() == 0:
        return group.send(tensors=tensors, dstRank=1, tag=0)
    return group.recv(tensors=tensors, srcRank=0, tag=0)


one, two, three = (partial(tensors_of, count) for count in (1, 2, 3))
room, half, six = partial(each, 1), partial(torch.zeros, 3), partial(torch.zeros, 6)
MAX, PRODUCT = dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT
HALVES = {"output_split_sizes": [3, 3], "input_split_sizes": [3, 3]}
#: For each form the tensors that it fills, or changes, and the call.
FORMS: list[tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = [
    (own, lambda g, o: g.allreduce(o)),
    (own, lambda g, o: g.allreduce(o, MAX)),
    (own, lambda g, o: g.allreduce(o, op=MAX)),
    (own, lambda g, o: g.allreduce(tensor=o, timeout=SOON)),
    (own, lambda g, o: g.allreduce(o, MAX, SOON)),
    (one, lambda g, o: g.allreduce(o)),
    (one, lambda g, o: g.allreduce(o, PRODUCT)),
    (one, lambda g, o: g.allreduce(o, dist.ReduceOp(MAX))),
    (one, lambda g, o: g.allreduce(o, op=MAX, timeout=SOON)),
    (one, lambda g, o: g.allreduce(o, options(c10d.AllreduceOptions, reduceOp=MAX))),
    (one, lambda g, o: g.allreduce(tensors=o, opts=options(c10d.AllreduceOptions, reduceOp=MAX))),
    (one, lambda g, o: g.allreduce(tuple(o))),
    (two, lambda g, o: g.allreduce(o)),
    (three, lambda g, o: g.allreduce(o, MAX)),
    (three, lambda g, o: g.allreduce_coalesced(o)),
    (three, lambda g, o: g.allreduce_coalesced(tensors=o, opts=options(c10d.AllreduceCoalescedOptions, reduceOp=MAX))),
    (own, lambda g, o: g.broadcast(o, ROOT)),
    (own, lambda g, o: g.broadcast(o, 0)),
    (own, lambda g, o: g.broadcast(o, root=ROOT, timeout=SOON)),
    (one, lambda g, o: g.broadcast(o)),
    (one, lambda g, o: g.broadcast(o, options(c10d.BroadcastOptions, rootRank=ROOT))),
    (two, lambda g, o: g.broadcast(o, options(c10d.BroadcastOptions, rootRank=ROOT, rootTensor=1))),
    (own, lambda g, o: g.reduce(o, ROOT)),
    (own, lambda g, o: g.reduce(o, ROOT, MAX)),
    (own, lambda g, o: g.reduce(o, root=ROOT, op=MAX, timeout=SOON)),
    (one, lambda g, o: g.reduce(o, options(c10d.ReduceOptions, rootRank=ROOT, reduceOp=MAX))),
    (each, lambda g, o: g.allgather(o, own())),
    (each, lambda g, o: g.allgather(output_tensors=o, input_tensor=own(), timeout=SOON)),
    (each, lambda g, o: g.allgather([o], [own()])),
    (each, lambda g, o: g.allgather(output_tensors=[o], input_tensors=[own()], opts=c10d.AllgatherOptions())),
    (lambda: [each(4), each(4)], lambda g, o: g.allgather(o, two())),
    (lambda: [each(), each()], lambda g, o: g.allgather_coalesced(o, two())),
    (lambda: at_root(each()), lambda g, o: g.gather(o, own(), ROOT)),
    (lambda: at_root(each()), lambda g, o: g.gather(output_tensors=o, input_tensor=own(), root=ROOT, timeout=SOON)),
    (
        lambda: at_root(each()),
        lambda g, o: g.gather([o] if o else [], [own()], options(c10d.GatherOptions, rootRank=ROOT)),
    ),
    (room, lambda g, o: g.scatter(o[0], at_root(two()), ROOT)),
    (room, lambda g, o: g.scatter(output_tensor=o[0], input_tensors=at_root(two()), root=ROOT, timeout=SOON)),
    (room, lambda g, o: g.scatter(o, at_root([two()]), options(c10d.ScatterOptions, rootRank=ROOT))),
    (room, lambda g, o: g.reduce_scatter(o[0], two())),
    (room, lambda g, o: g.reduce_scatter(output=o[0], input=two(), op=MAX, timeout=SOON)),
    (room, lambda g, o: g.reduce_scatter(o, [two()], options(c10d.ReduceScatterOptions, reduceOp=MAX))),
    (each, lambda g, o: g.alltoall(o, two())),
    (each, lambda g, o: g.alltoall(output_tensors=o, input_tensors=two(), opts=c10d.AllToAllOptions())),
    (six, lambda g, o: g.alltoall_base(o, numbers(), [], [])),
    (six, lambda g, o: g.alltoall_base(o, numbers(), [3, 3], [3, 3], timeout=SOON)),
    (six, lambda g, o: g.all_to_all_single(output=o, input=numbers(), **HALVES, opts=c10d.AllToAllOptions())),
    (six, lambda g, o: g.all_gather_single(output=o, input=own())),
    (six, lambda g, o: g._allgather_base(o, own(), opts=c10d.AllgatherOptions())),
    (half, lambda g, o: g.reduce_scatter_single(outputTensor=o, inputTensor=torch.arange(6.0))),
    (half, lambda g, o: g._reduce_scatter_base(o, torch.arange(6.0), c10d.ReduceScatterOptions())),
    (lambda: [six()], lambda g, o: g.allgather_into_tensor_coalesced(outputs=o, inputs=[own()])),
    (room, lambda g, o: g.reduce_scatter_tensor_coalesced(outputs=o, inputs=[torch.arange(6.0)])),
    (list, lambda g, _: g.barrier()),
    (list, lambda g, _: g.barrier(opts=c10d.BarrierOptions())),
    (list, lambda g, _: g.barrier(timeout=SOON)),
    (one, meet),
]

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
    """What each form gives on this rank, by its place and its text."""
    found: dict[str, Any] = {}
    for number, (fill, call) in enumerate(FORMS):
        tensors = fill()
        call(group, tensors).wait()
        text = inspect.getsource(call).strip()
        # Gloo spoils the tensors of other ranks.
        found[f"{number}: {text}"] = at_root([tensors]) if "g.reduce(" in text else tensors
    return found
