"""What a reducer is: a sum over ranks that costs less than an exact one, and may lose something on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.checks import check_numbers
from bagua.comm import Communicator
from bagua.errors import ConfigurationError, InvalidTensorError
from bagua.primitives.memory import MatrixBlock, ReducerMemory, State, summing_dtype

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
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
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
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
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
