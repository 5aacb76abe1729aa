"""Every collective once, as data: what each rank passes, and what plain tensors say that it must find."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

import bagua.comm
from bagua.comm import Communicator, ReduceOp, Work

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

#: Every dtype that is reduced, and every one that is at least carried.
REDUCED = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
COPIED = (*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint64)

_ORDERED = (*FLOATS, *INTEGERS, torch.bool)
_BITS = (*INTEGERS, torch.bool)

#: The dtypes for which each reduction has a meaning.
LEGAL: tuple[tuple[ReduceOp.RedOpType, tuple[torch.dtype, ...]], ...] = (
    (ReduceOp.SUM, REDUCED), (ReduceOp.PRODUCT, REDUCED), (ReduceOp.MIN, _ORDERED), (ReduceOp.MAX, _ORDERED),
    (ReduceOp.AVG, (*FLOATS, *COMPLEX)), (ReduceOp.BAND, _BITS), (ReduceOp.BOR, _BITS), (ReduceOp.BXOR, _BITS),
)  # fmt: skip
_FOLDS = (
    (ReduceOp.SUM, torch.add), (ReduceOp.AVG, torch.add), (ReduceOp.PRODUCT, torch.mul),
    (ReduceOp.MIN, torch.minimum), (ReduceOp.MAX, torch.maximum),
    (ReduceOp.BAND, torch.bitwise_and), (ReduceOp.BOR, torch.bitwise_or), (ReduceOp.BXOR, torch.bitwise_xor),
)  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers that suit ``dtype``, the same for the same ``seed`` everywhere."""
    return _drawn(shape, dtype, seed).clone()


@functools.lru_cache(maxsize=64)  # Every rank needs the numbers of all ranks, for each kind of call.
@torch.inference_mode(mode=False)
def _drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    low, high = {torch.bool: (0, 2), torch.uint8: (0, 256), torch.int8: (-128, 128)}.get(dtype, (-9, 10))
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def garbage(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What an output holds before a result is there: nothing that could pass for one."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan")).to(dtype)
    return torch.full(shape, 77, dtype=torch.int64).to(dtype)


def reduced(inputs: list[torch.Tensor], op: ReduceOp.RedOpType) -> torch.Tensor:
    """The reduction of the inputs of all ranks, equal in shape and dtype, computed in the widest dtype there is."""
    dtype = inputs[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    if dtype is torch.bool and op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        op = ReduceOp.MAX if op == ReduceOp.SUM else ReduceOp.MIN
    fold = next(fold for known, fold in _FOLDS if op == known)
    total = functools.reduce(fold, [one.to(wide) for one in inputs])
    return (total / len(inputs) if op == ReduceOp.AVG else total).to(dtype)


def assert_same(
    actual: torch.Tensor, expected: torch.Tensor, message: str, *, relative: float = 0.0, absolute: float = 0.0
) -> None:
    """Fail unless two tensors hold the same bits, or differ by so many ``eps`` where numbers are rounded at all."""
    assert actual.dtype is expected.dtype, f"{message}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{message}: {actual.shape} instead of {expected.shape}"
    actual, expected = _plain(actual), _plain(expected)
    if relative and (expected.dtype.is_floating_point or expected.dtype.is_complex):
        eps = torch.finfo(expected.dtype).eps
        if expected.dtype in (torch.float16, torch.bfloat16):
            actual, expected = actual.float(), expected.float()
        bounds = {"rtol": relative * eps, "atol": absolute * eps}
        torch.testing.assert_close(actual, expected, **bounds, msg=lambda text: f"{message}: {text}")
        return
    same = torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert same, f"{message}: {actual} instead of {expected}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A flat copy. ``contiguous()`` is not enough: it leaves a single element its odd stride."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)


def communicator() -> Communicator:
    """The communicator of all ranks of this run."""
    return bagua.comm.get_default_group().global_communicator


def home(comm: Communicator) -> torch.device:
    """A device whose tensors ``comm`` carries."""
    if "cpu" in comm.device_types:
        return torch.device("cpu")
    kind = torch.device(next(iter(comm.device_types)))
    return torch.device(kind.type, comm.ranks[comm.rank] % torch.get_device_module(kind).device_count())


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """The plainest layout."""
    return tensor


@dataclass(frozen=True)
class CallSetting:
    """How an exercise is done."""

    shape: tuple[int, ...] = (2, 3)  # of one rank's share
    dtype: torch.dtype = torch.float32
    op: ReduceOp.RedOpType = ReduceOp.SUM  # where something is reduced
    root: int = 0  # where there is one; also the destination
    seed: int = 1  # of the numbers
    present: Callable[[torch.Tensor], torch.Tensor] = as_it_is  # gives a tensor another layout, keeping its values
    options: dict[str, Any] = field(default_factory=dict)  # ``async_op``, ``timeout``
    rounds_once: bool = False  # 16-bit floats are reduced in float32 and rounded to the nearest at the end

    def own(self, rank: int, shares: int | None = None) -> torch.Tensor:
        """The numbers that ``rank`` contributes: one share, or several along a new first dimension."""
        shape = self.shape if shares is None else (shares, *self.shape)
        return values(shape, self.dtype, 1000 * self.seed + rank)

    def of_each(self, group: Any, shares: int | None = None) -> list[torch.Tensor]:
        """The same of all ranks of ``group``, in their order."""
        return [self.own(rank, shares) for rank in range(group.size)]

    def place(self, numbers: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """A new tensor with these numbers, where and how the exercise wants it."""
        return self.present(numbers.to(home(comm), copy=True))

    def room(self, shape: tuple[int, ...], comm: Communicator) -> torch.Tensor:
        """A new tensor for a result."""
        return self.place(garbage(shape, self.dtype), comm)

    def assert_reduced(self, actual: torch.Tensor, inputs: list[torch.Tensor], message: str) -> None:
        """Fail unless ``actual`` is the reduction of the inputs of all ranks."""
        relative, absolute = 2.0 * len(inputs), 8.0 * len(inputs)
        if self.rounds_once and actual.dtype in (torch.float16, torch.bfloat16):
            relative, absolute = 1.0, 1 / 1024  # It may be the neighbour, where float32 is almost between the two.
        assert_same(actual, reduced(inputs, self.op), message, relative=relative, absolute=absolute)

    def with_options(self, **options: Any) -> CallSetting:
        """The same with other options of the call."""
        return replace(self, options={**self.options, **options})


class Exercise(NamedTuple):
    """A started collective."""

    works: list[Work | None]  # that the calls returned; None for those that were synchronous
    check: Callable[[], None]  # fails unless the result is right and nothing else was changed
    results: list[torch.Tensor]  # that must be bitwise identical on all ranks
    touched: list[torch.Tensor]  # every tensor that was passed


Begin = Callable[[Communicator, CallSetting], Exercise]


def perform(kind: str, comm: Communicator, setting: CallSetting) -> Exercise:
    """Do the exercise ``kind``, wait for it, and check the result."""
    exercise = EXERCISES[kind](comm, setting)
    for work in exercise.works:
        if work is not None:
            work.wait()
    exercise.check()
    return exercise


def started(
    kind: str, place: Any, s: CallSetting, works: list[Any],
    outputs: Iterable[tuple[torch.Tensor | None, torch.Tensor | list[torch.Tensor] | None]],
    inputs: Iterable[tuple[torch.Tensor | None, torch.Tensor]] = (), *, alike: bool = False,
) -> Exercise:  # fmt: skip
    """A call that was started in a group, with this process's ``rank`` and the ``size``.

    Args:
        outputs: tensors with what they must hold then: numbers, or those of all ranks, to be reduced; None: anything.
        inputs: tensors with the numbers that they must keep.
        alike: whether the outputs must be bitwise identical on all ranks.
    """
    what = f"{kind} of {tuple(s.shape)} {s.dtype} {s.op} root {s.root}"
    what = f"{what} {s.present.__name__} on rank {place.rank} of {place.size}"
    filled = [(tensor, expected) for tensor, expected in outputs if tensor is not None]
    kept = [(tensor, numbers) for tensor, numbers in inputs if tensor is not None]

    def check() -> None:
        for number, (tensor, expected) in enumerate(filled):
            if isinstance(expected, list):
                s.assert_reduced(tensor, expected, what)
            elif expected is not None:
                assert_same(tensor, expected, f"output {number} of {what}")
        for tensor, numbers in kept:
            assert_same(tensor, numbers, f"input of {what}")

    given = [tensor for tensor, _ in filled]
    return Exercise(works, check, given if alike else [], [*given, *(tensor for tensor, _ in kept)])


def _allreduce(comm: Communicator, s: CallSetting) -> Exercise:
    inputs = s.of_each(comm)
    tensor = s.place(inputs[comm.rank], comm)
    work = comm.allreduce(tensor, s.op, **s.options)
    return started("allreduce", comm, s, [work], [(tensor, inputs)], alike=True)


def _reduce(comm: Communicator, s: CallSetting) -> Exercise:
    inputs = s.of_each(comm)
    tensor = s.place(inputs[comm.rank], comm)
    work = comm.reduce(tensor, s.root, s.op, **s.options)
    return started("reduce", comm, s, [work], [(tensor, inputs if comm.rank == s.root else inputs[comm.rank])])


def _broadcast(comm: Communicator, s: CallSetting) -> Exercise:
    tensor = s.place(s.own(comm.rank), comm)
    work = comm.broadcast(tensor, s.root, **s.options)
    return started("broadcast", comm, s, [work], [(tensor, s.own(s.root))], alike=True)


def _allgather(comm: Communicator, s: CallSetting) -> Exercise:
    own = s.own(comm.rank)
    output, tensor = s.room((comm.size, *s.shape), comm), s.place(own, comm)
    work = comm.allgather(output, tensor, **s.options)
    return started("allgather", comm, s, [work], [(output, torch.stack(s.of_each(comm)))], [(tensor, own)], alike=True)


def _gather(comm: Communicator, s: CallSetting) -> Exercise:
    own = s.own(comm.rank)
    output = s.room((comm.size, *s.shape), comm) if comm.rank == s.root else None
    tensor = s.place(own, comm)
    work = comm.gather(output, tensor, s.root, **s.options)
    return started("gather", comm, s, [work], [(output, torch.stack(s.of_each(comm)))], [(tensor, own)])


def _scatter(comm: Communicator, s: CallSetting) -> Exercise:
    sent = s.own(s.root, comm.size)
    output = s.room(s.shape, comm)
    tensor = s.place(sent, comm) if comm.rank == s.root else None
    work = comm.scatter(output, tensor, s.root, **s.options)
    return started("scatter", comm, s, [work], [(output, sent[comm.rank])], [(tensor, sent)])


def _reduce_scatter(comm: Communicator, s: CallSetting) -> Exercise:
    inputs = s.of_each(comm, comm.size)
    output, tensor = s.room(s.shape, comm), s.place(inputs[comm.rank], comm)
    work = comm.reduce_scatter(output, tensor, s.op, **s.options)
    shares = [numbers[comm.rank] for numbers in inputs]
    return started("reduce_scatter", comm, s, [work], [(output, shares)], [(tensor, inputs[comm.rank])])


def _alltoall(comm: Communicator, s: CallSetting) -> Exercise:
    inputs = s.of_each(comm, comm.size)
    output, tensor = s.room((comm.size, *s.shape), comm), s.place(inputs[comm.rank], comm)
    work = comm.alltoall(output, tensor, **s.options)
    expected = torch.stack([sent[comm.rank] for sent in inputs])
    return started("alltoall", comm, s, [work], [(output, expected)], [(tensor, inputs[comm.rank])])


def _alltoall_v(comm: Communicator, s: CallSetting) -> Exercise:
    """Shares of none, one, two and three thirds of the elements, so that some ranks send nothing to some."""
    numel = math.prod(s.shape)
    counts = [[(i + 2 * j + s.seed) % 4 * numel // 3 for j in range(comm.size)] for i in range(comm.size)]
    inputs = [replace(s, shape=(sum(row),)).own(rank) for rank, row in enumerate(counts)]
    from_each = [row[comm.rank] for row in counts]
    output, tensor = s.room((sum(from_each),), comm), s.place(inputs[comm.rank], comm)
    work = comm.alltoall_v(output, tensor, from_each, counts[comm.rank], **s.options)
    expected = torch.cat([torch.split(sent, row)[comm.rank] for sent, row in zip(inputs, counts, strict=True)])
    return started("alltoall_v", comm, s, [work], [(output, expected)], [(tensor, inputs[comm.rank])])


def _sendrecv(comm: Communicator, s: CallSetting) -> Exercise:
    """Around a ring."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    own = s.own(comm.rank)
    output, tensor = s.room(s.shape, comm), s.place(own, comm)
    work = comm.sendrecv(output, tensor, before, after, **s.options)
    return started("sendrecv", comm, s, [work], [(output, s.own(before))], [(tensor, own)])


def _send_and_recv(comm: Communicator, s: CallSetting) -> Exercise:
    """Along a line: each rank receives from the one before it, then sends to the next, twice."""
    works: list[Work | None] = []
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    for message in range(2):
        if comm.rank > 0:
            received.append((s.room(s.shape, comm), s.own(comm.rank - 1 + 10 * message)))
            works.append(comm.recv(received[-1][0], comm.rank - 1, **s.options))
        if comm.rank < comm.size - 1:
            own = s.own(comm.rank + 10 * message)
            sent.append((s.place(own, comm), own))
            works.append(comm.send(sent[-1][0], comm.rank + 1, **s.options))
    return started("send and recv", comm, s, works, received, sent)


def several(s: CallSetting) -> list[CallSetting]:
    """Four settings with two dtypes, in an order that mixes them; two of them differ in their numbers only."""
    dtypes = next(dtypes for op, dtypes in LEGAL if op == s.op)
    other = dtypes[(dtypes.index(s.dtype) + 1) % len(dtypes)] if s.dtype in dtypes else torch.int32
    again = [replace(s, seed=s.seed + 2), replace(s, shape=(), seed=s.seed + 3)]
    return [s, replace(s, dtype=other, shape=(4,), seed=s.seed + 1), *again]


def _allreduce_coalesced(comm: Communicator, s: CallSetting) -> Exercise:
    inputs = [part.of_each(comm) for part in several(s)]
    tensors = [s.place(numbers[comm.rank], comm) for numbers in inputs]
    work = comm.allreduce_coalesced(tensors, s.op, **s.options)
    return started("allreduce_coalesced", comm, s, [work], zip(tensors, inputs, strict=True), alike=True)


def _broadcast_coalesced(comm: Communicator, s: CallSetting) -> Exercise:
    inputs = [part.of_each(comm) for part in several(s)]
    tensors = [s.place(numbers[comm.rank], comm) for numbers in inputs]
    work = comm.broadcast_coalesced(tensors, s.root, **s.options)
    expected = [numbers[s.root] for numbers in inputs]
    return started("broadcast_coalesced", comm, s, [work], zip(tensors, expected, strict=True), alike=True)


#: Exercises on one kind of tensor collective each.
TENSOR_KINDS: dict[str, Begin] = {
    "allreduce": _allreduce, "reduce": _reduce, "broadcast": _broadcast, "allgather": _allgather, "gather": _gather,
    "scatter": _scatter, "reduce_scatter": _reduce_scatter, "alltoall": _alltoall, "alltoall_v": _alltoall_v,
    "sendrecv": _sendrecv, "send_and_recv": _send_and_recv,
}  # fmt: skip

#: All exercises.
EXERCISES: dict[str, Begin] = {
    **TENSOR_KINDS, "barrier": lambda comm, s: started("barrier", comm, s, [comm.barrier(**s.options)], []),
    "allreduce_coalesced": _allreduce_coalesced, "broadcast_coalesced": _broadcast_coalesced,
}  # fmt: skip
