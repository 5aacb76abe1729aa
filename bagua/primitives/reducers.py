"""What a reducer is: a sum over ranks that costs less than an exact one, and may lose something on the way.

First what it remembers of a flat tensor: declared by name, changed in one go, and the buffers to work with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bagua.checks import check_numbers
from bagua.comm import Communicator
from bagua.errors import ConfigurationError, InvalidTensorError

__all__ = ["ErrorFeedback", "MatrixBlock", "ReducerMemory", "State", "SumReducer"]


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are added: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class State:
    """Something that is remembered of a flat tensor from call to call, declared by the value that remembers it.

    Args:
        name: name of the state, among all that is remembered of the tensor.
        start: the value of all elements before the first call; ``weights`` for a copy of the weights; or
            a function of the memory that returns the tensor.
        per: ``element``: one number for each element, in single precision at least, that belongs to the
            element's parameter. ``flat``: anything that belongs to the flat tensor as a whole. ``family``: a set of
            states, each under a name that begins with this one and a dot, made while training.
        scope: ``shared``: equal on all ranks of the exchange after equally many exchanges. ``local``: of one rank.
        of_members: True for a sum over the ranks that took part in earlier calls: it is wrong once others do.
        narrow: True keeps it in the dtype of the tensor, where that has fewer bits than single precision.
        device: device on which it lies, as ``cpu``; None for where the tensor does.
    """

    name: str
    start: Literal["weights"] | float | Callable[[ReducerMemory], torch.Tensor] = 0.0
    per: Literal["element", "flat", "family"] = "element"
    scope: Literal["shared", "local"] = "local"
    of_members: bool = False
    narrow: bool = False
    device: Literal["cpu"] | None = None


@dataclass(frozen=True)
class MatrixBlock:
    """A part of a flat tensor that is the memory of a matrix, row by row.

    Attributes:
        offset: offset of its first element.
        rows: number of rows.
        columns: number of columns.
    """

    offset: int
    rows: int
    columns: int

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int) -> MatrixBlock | None:
        """``tensor``, which is dense, as a matrix; None if it has fewer than two dimensions or elements.

        The dimension with the longest stride counts the rows: the first one that is longer than 1, as a rule.

        Args:
            tensor: tensor whose memory it is.
            offset: offset of that memory in the flat tensor, in elements.

        Example:
            >>> MatrixBlock.of(torch.zeros(1, 4, 3, 2), 10)
            MatrixBlock(offset=10, rows=4, columns=6)
        """
        if tensor.dim() < 2 or tensor.numel() < 2:
            return None
        _, rows = max(
            (stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1
        )
        return cls(offset, rows, tensor.numel() // rows)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns


class ReducerMemory:
    """What a reducer keeps from call to call for one flat tensor: its state, and buffers.

    ``SumReducer.memory`` makes one. State changes are transactional: a call of ``reduce``
    computes the new state beside the old one, and ``settle`` puts it in force, or drops
    it if the result is not finite.

    Args:
        communicator: provides memory that it can exchange without a copy.
        numel: elements of the tensor.
        dtype: dtype of the tensor.
        device: device of the tensor.
        blocks: the matrices in it.
        padding: positions of elements that belong to nothing and are zero; None if there are none.

    Attributes:
        state: state that is in force. To be saved and restored with the training.
        declared: declarations of what ``state`` may hold, by name.
        step: number of the training step; equal on all ranks.
        loss_scale: factor by which the values were multiplied. State is kept free of it.
        proposed: tensors that were proposed since the last ``settle``, by name.
        torn: reason, in words, why a change of ``state`` ended half-way; empty if none did.
    """

    def __init__(
        self,
        communicator: Communicator,
        numel: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        blocks: Sequence[MatrixBlock] = (),
        padding: torch.Tensor | None = None,
    ) -> None:
        self.padding = padding
        self.numel = numel
        self.dtype = dtype
        self.device = torch.device(device)
        self.blocks = tuple(blocks)
        self.state: dict[str, torch.Tensor] = {}
        self.declared: dict[str, State] = {}
        self.step = 0
        self.loss_scale = 1.0
        self.torn = ""
        self._communicator = communicator
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.proposed: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat buffer that keeps its contents until the next call with this name, dtype and a larger size."""
        found = self._buffers.get((name, dtype))
        if found is None or found.numel() < numel:
            found = self._communicator.empty(numel, dtype=dtype, device=self.device).zero_()
            self._buffers[name, dtype] = found
        return found[:numel]

    def clear_padding(self, flat: torch.Tensor) -> None:
        """Make zero what belongs to nothing: a codec may have made something else of it, which must not add up."""
        if self.padding is not None:
            flat.index_fill_(0, self.padding, 0)

    def declare(self, states: Iterable[State]) -> None:
        """Remember more, from its start. What is declared already keeps its value."""
        for one in states:
            if one.name not in self.declared:
                self.declared[one.name] = one
                if one.per != "family":
                    self.state[one.name] = self._start_of(one)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change ``state`` where it lies. If that ends half-way, what is there belongs to no moment of the training."""
        try:
            yield
        except BaseException as error:
            self.tear(error)
            raise

    def tear(self, error: BaseException) -> None:
        """Note that ``error`` has ended a change of ``state`` half-way."""
        self.torn = f"{type(error).__name__}: {error}"

    def begin_again(self) -> None:
        """Remember what there was before the first call."""
        self.torn = ""
        declared = list(self.declared.values())
        self.state.clear()
        self.declared.clear()
        self.forget_proposals()
        self.declare(declared)

    def _start_of(self, one: State) -> torch.Tensor:
        if callable(one.start):
            return one.start(self)
        start = 0.0 if one.start == "weights" else one.start  # The weights are filled in by who knows them.
        dtype = self.dtype if one.narrow else summing_dtype(self.dtype)
        made = torch.full((self.numel,), start, dtype=dtype, device=one.device or self.device)
        return made.pin_memory() if made.device.type == "cpu" and self.device.type == "cuda" else made

    def is_elementwise(self, name: str) -> bool:
        """Whether ``state[name]`` has one number for each element."""
        declared = self._declaration(name)
        if declared.per == "family":
            return self.state[name].shape == (self.numel,)
        return declared.per == "element"

    def shared(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of what is equal on all ranks of the exchange, in an order that all have."""
        return ((name, self.state[name]) for name in sorted(self.state) if self._declaration(name).scope == "shared")

    def _declaration(self, name: str) -> State:
        return self.declared.get(name) or self.declared[name.partition(".")[0]]

    def forget_proposals(self) -> None:
        """Drop what was proposed."""
        self.proposed = {}

    def propose(self, name: str) -> torch.Tensor:
        """Where to write the next value of ``state[name]``."""
        if name not in self._spare:
            self._spare[name] = torch.empty_like(self.state[name])
        self.proposed[name] = self._spare[name]
        return self.proposed[name]

    def settle(self, result: torch.Tensor) -> None:
        """Put the proposed state in force if ``result`` is finite, which all ranks find alike; else drop it.

        Args:
            result: result of the call that proposed it, bitwise identical on all ranks.
        """
        proposed, self.proposed = self.proposed, {}
        if not proposed:
            return
        finite = torch.isfinite(result.sum(dtype=summing_dtype(result.dtype)))
        for name, value in proposed.items():
            if self.device.type != "cpu":  # Reading the flag would wait for the device.
                torch.where(finite, value, self.state[name], out=self.state[name])
            elif finite:
                self.state[name], self._spare[name] = value, self.state[name]


#: Takes what is lost of what a rank sends; None if nobody asks for it.
Remainder = torch.Tensor | None
#: What every reducer takes, unless its codec takes less.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class SumReducer(ABC):
    """Replaces a flat tensor by its sum over all ranks, or by something near that.

    Whatever is lost, the result is bitwise identical on all ranks, and what is not finite
    on one rank makes it not finite on all. Subclasses are frozen dataclasses that hold
    options; what changes is kept in a ``ReducerMemory``. Calls that communicate are made in one
    fixed order, so several tensors can be reduced one after the other, on all ranks alike.

    Attributes:
        alone: does something on one rank, too, as a momentum does.
        feeds_back: True if it keeps what is lost for later calls, so that nothing of it is left for a ``remainder``.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.compression import MinMaxUInt8
        >>> from bagua.primitives import ScatterGatherReducer
        >>> communicator, tensor = solo_group().global_communicator, torch.tensor([0.0, 0.5, 1.0])
        >>> reducer = ScatterGatherReducer(MinMaxUInt8())
        >>> reducer.reduce(tensor, communicator, reducer.memory(communicator, tensor))
        >>> (tensor - torch.tensor([0.0, 0.5, 1.0])).abs().max() < 0.01
        tensor(True)
    """

    alone: ClassVar[bool] = False
    feeds_back: ClassVar[bool] = False

    def memory(
        self,
        communicator: Communicator,
        like: torch.Tensor,
        blocks: Sequence[MatrixBlock] = (),
        padding: torch.Tensor | None = None,
    ) -> ReducerMemory:
        """What ``reduce`` needs for tensors like ``like``; state as it is before the first call.

        Args:
            communicator: provides buffers that it can exchange without a copy.
            like: a flat tensor.
            blocks: the matrices in it, for reducers that make use of them.
            padding: positions of elements that belong to nothing and are zero.

        Raises:
            InvalidTensorError: a dtype that cannot be reduced.
        """
        self.check_dtype(like.dtype)
        memory = ReducerMemory(communicator, like.numel(), like.dtype, like.device, blocks, padding)
        memory.declare(self.state())
        return memory

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what cannot be reduced.

        Raises:
            InvalidTensorError: a dtype that cannot be reduced.
        """
        if dtype not in FLOATING:
            raise InvalidTensorError(
                "parameters and tensors of this dtype cannot be compressed",
                argument="tensor",
                expected=" or ".join(map(str, FLOATING)),
                seen=dtype,
                advice="Use an algorithm in full precision, as gradient_allreduce.",
            )

    def state(self) -> tuple[State, ...]:
        """What is remembered from call to call."""
        return ()

    @property
    def contraction(self) -> float | None:
        """Which part of the square of any block each compression keeps, as ``Codec.contraction``; None if unknown.

        Feedback does not change that: it brings what is lost with later calls.
        """
        return None

    @abstractmethod
    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """Replace ``flat`` by its approximate sum over the ranks of ``communicator``.

        Args:
            flat: one-dimensional and contiguous; equal in dtype and size on all ranks.
            communicator: communicator of the ranks that take part.
            memory: from ``memory`` of this reducer; ``settle`` it afterwards.
            remainder: like ``flat``, or None. Takes what is lost of this rank's share: the
                sum over ranks of ``flat`` before is ``flat`` afterwards plus the sum of ``remainder``.
                Error feedback needs nothing else.
        """


@dataclass(frozen=True)
class FeedbackReducer(SumReducer):
    """What all forms of error feedback have in common: another reducer, which has none.

    Args:
        reducer: any other reducer.

    Raises:
        ConfigurationError: ``reducer`` is none, or has error feedback already.
    """

    reducer: SumReducer

    feeds_back: ClassVar[bool] = True

    def __post_init__(self) -> None:
        reducer: object = self.reducer
        if not isinstance(reducer, SumReducer) or isinstance(reducer, FeedbackReducer):
            raise ConfigurationError(
                "error feedback is applied once, to a reducer",
                argument="reducer",
                expected="a SumReducer without it",
                seen=repr(self.reducer),
            )

    @property
    def contraction(self) -> float | None:
        """That of the inner reducer."""
        return self.reducer.contraction

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the inner reducer refuses."""
        super().check_dtype(dtype)
        self.reducer.check_dtype(summing_dtype(dtype))


@dataclass(frozen=True)
class ErrorFeedback(FeedbackReducer):
    """What ``reducer`` loses of a tensor is added to the next one.

    ``x_i = g_i + decay e_i``; ``result = reducer(x)``; ``e_i <- what is lost of x_i``

    The residual ``e`` has the size of the tensor, in single precision for 16-bit dtypes, and
    is kept in unscaled units (see ``ReducerMemory.loss_scale``).

    It is a part of the sum: of what ``Mean`` gives, ``1 / n`` of a rank's own. So when the number of ranks changes, it
    stays as it is: the next result pays what all results before lack, no matter who took part in them. A rank that
    leaves takes its residual along; one that joins begins with zeros.

    Args:
        reducer: any other reducer.
        decay: part of a residual that is kept until the next call, above 0 and at most 1. Less than 1 forgets what is
            old, as is good where the tensors are differences of weights after many steps.

    Raises:
        ConfigurationError: ``reducer`` is none, or has error feedback already; ``decay`` is out of its range.

    Example:
        >>> from bagua.compression import Sign
        >>> from bagua.primitives import AllGatherReducer
        >>> ErrorFeedback(AllGatherReducer(Sign()))
        ErrorFeedback(reducer=AllGatherReducer(codec=Sign(block_numel=2048)), decay=1.0)

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(lambda part: 0 < part <= 1, "a number above 0 and at most 1", decay=self.decay)

    def state(self) -> tuple[State, ...]:
        """A residual of zeros, and the state of the inner reducer."""
        return (State("residual"), *self.reducer.state())

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """Reduce ``flat`` plus the residual; see ``SumReducer.reduce``. Nothing remains that is not fed back."""
        assert remainder is None, "what is lost stays here"
        residual = memory.state["residual"]
        exact = flat
        if flat.dtype != residual.dtype:
            exact = memory.buffer("exact", flat.numel(), residual.dtype).copy_(flat)
        exact.add_(residual, alpha=self.decay * memory.loss_scale)
        lost = memory.propose("residual")
        self.reducer.reduce(exact, communicator, memory, lost)
        memory.clear_padding(lost)
        if memory.loss_scale != 1.0:
            lost.div_(memory.loss_scale)
        if exact is not flat:
            flat.copy_(exact)
