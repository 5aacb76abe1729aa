"""What a reducer is: a sum over ranks that costs less than an exact one, and may lose something on the way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua.comm import Communicator
from bagua.errors import ConfigurationError, InvalidTensorError

__all__ = ["ErrorFeedback", "MatrixBlock", "ReducerMemory", "SumReducer", "summing_dtype"]

#: What every reducer takes, unless its codec takes less.
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are added: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class MatrixBlock:
    """A part of a flat tensor that is the memory of a matrix, row by row.

    Attributes:
        offset: of its first element.
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
            tensor: whose memory it is.
            offset: of that memory in the flat tensor, in elements.

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
        dtype: of the tensor.
        device: of the tensor.
        blocks: the matrices in it.
        padding: positions of elements that belong to nothing and are zero; None if there are none.

    Attributes:
        state: in force. To be saved and restored with the training.
        step: number of the training step; equal on all ranks.
        loss_scale: what the values were multiplied by. State is kept free of it.
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
        self.step = 0
        self.loss_scale = 1.0
        self._communicator = communicator
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._proposed: dict[str, torch.Tensor] = {}
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

    def propose(self, name: str) -> torch.Tensor:
        """Where to write the next value of ``state[name]``."""
        if name not in self._spare:
            self._spare[name] = torch.empty_like(self.state[name])
        self._proposed[name] = self._spare[name]
        return self._proposed[name]

    def settle(self, result: torch.Tensor) -> None:
        """Put the proposed state in force if ``result`` is finite, which all ranks find alike; else drop it.

        Args:
            result: of the call that proposed it, bitwise identical on all ranks.
        """
        proposed, self._proposed = self._proposed, {}
        if not proposed:
            return
        finite = torch.isfinite(result.sum(dtype=summing_dtype(result.dtype)))
        for name, value in proposed.items():
            if self.device.type != "cpu":  # Reading the flag would wait for the device.
                torch.where(finite, value, self.state[name], out=self.state[name])
            elif finite:
                self.state[name], self._spare[name] = value, self.state[name]


class SumReducer(ABC):
    """Replaces a flat tensor by its sum over all ranks, or by something near that.

    Whatever is lost, the result is bitwise identical on all ranks, and what is not finite
    on one rank makes it not finite on all. Subclasses are frozen dataclasses that hold
    options; what changes is kept in a ``ReducerMemory``. Calls that communicate are made in one
    fixed order, so several tensors can be reduced one after the other, on all ranks alike.

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
        memory.state = self.init_state(memory)
        return memory

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what cannot be reduced.

        Raises:
            InvalidTensorError: a dtype that cannot be reduced.
        """
        if dtype not in FLOATING:
            raise InvalidTensorError(
                f"{self!r} cannot reduce this dtype",
                argument="tensor",
                expected=" or ".join(map(str, FLOATING)),
                seen=dtype,
                advice="Use an algorithm in full precision, as gradient_allreduce.",
            )

    def init_state(self, memory: ReducerMemory) -> dict[str, torch.Tensor]:  # noqa: ARG002  # for subclasses
        """What is remembered of the tensor that ``memory`` is for, before the first call."""
        return {}

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
            communicator: of the ranks that take part.
            memory: from ``memory`` of this reducer; ``settle`` it afterwards.
            remainder: like ``flat``, or None. Takes what is lost of this rank's share: the
                sum over ranks of ``flat`` before is ``flat`` afterwards plus the sum of ``remainder``.
        """


@dataclass(frozen=True)
class ErrorFeedback(SumReducer):
    """What ``reducer`` loses of a tensor is added to the next one.

    ``x_i = g_i + e_i``; ``result = reducer(x)``; ``e_i <- what is lost of x_i``

    The residual ``e`` has the size of the tensor, in single precision for 16-bit dtypes, and
    is kept in unscaled units (see ``ReducerMemory.loss_scale``).

    Args:
        reducer: any other reducer.

    Raises:
        ConfigurationError: ``reducer`` is none, or has error feedback already.

    Example:
        >>> from bagua.compression import MinMaxUInt8
        >>> from bagua.primitives import AllGatherReducer
        >>> ErrorFeedback(AllGatherReducer(MinMaxUInt8(block_numel=512)))
        ErrorFeedback(reducer=AllGatherReducer(codec=MinMaxUInt8(block_numel=512)))

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    reducer: SumReducer

    def __post_init__(self) -> None:
        reducer: object = self.reducer
        if not isinstance(reducer, SumReducer) or isinstance(reducer, ErrorFeedback):
            raise ConfigurationError(
                "error feedback is applied once, to a reducer",
                argument="reducer",
                expected="a SumReducer without it",
                seen=repr(self.reducer),
            )

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the inner reducer refuses."""
        super().check_dtype(dtype)
        self.reducer.check_dtype(summing_dtype(dtype))

    def init_state(self, memory: ReducerMemory) -> dict[str, torch.Tensor]:
        """A residual of zeros, and the state of the inner reducer."""
        residual = torch.zeros(memory.numel, dtype=summing_dtype(memory.dtype), device=memory.device)
        return {"residual": residual, **self.reducer.init_state(memory)}

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
        exact.add_(residual, alpha=memory.loss_scale)
        lost = memory.propose("residual")
        self.reducer.reduce(exact, communicator, memory, lost)
        memory.clear_padding(lost)
        if memory.loss_scale != 1.0:
            lost.div_(memory.loss_scale)
        if exact is not flat:
            flat.copy_(exact)
