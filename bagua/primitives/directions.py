"""A reducer that makes orthonormal directions of momenta, which it approximates by products of two thin matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.checks import check_numbers
from bagua.comm import Communicator
from bagua.primitives.memory import MatrixBlock, ReducerMemory, State, summing_dtype
from bagua.primitives.power_sgd import LowRankReducer, between_blocks

#: Added to the length of a column before it is divided by it.
_EPSILON = 1e-8


@dataclass(frozen=True)
class DionReducer(LowRankReducer):
    """For each matrix an orthonormal direction of low rank; everything else in the tensor is summed exactly.

    For matrices ``G_i``, with rows at least as many as columns (transposed otherwise), and ``B`` (columns x
    ``matrix_rank``) from the call before, on ``n`` ranks::

        M_i <- M_i + G_i
        A = orthonormal columns of sum_i M_i B;  R = sum_i transpose(M_i) A
        M_i <- M_i - (1 - momentum) / n A transpose(R)
        B <- R with columns of length 1
        result = sqrt(rows / columns) A transpose(B)

    The momenta ``M_i`` belong to their ranks: what an approximation leaves out stays there. ``result`` has the rows and
    columns of the matrix as it is, and is no sum: it does not grow with the gradients. A matrix is summed exactly where
    the thin ones would take as many elements.

    Args:
        matrix_rank: columns of the thin matrices.
        momentum: part of a direction that is kept, from 0 and less than 1.
        seed: seed of the first ``B``; equal on all ranks.

    Raises:
        ConfigurationError: an argument out of its range.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.primitives import MatrixBlock
        >>> communicator = solo_group().global_communicator
        >>> tensor = torch.outer(torch.arange(4.0), torch.arange(5.0)).view(-1)
        >>> reducer = DionReducer(matrix_rank=1)
        >>> reducer.reduce(tensor, communicator, reducer.memory(communicator, tensor, [MatrixBlock(0, 4, 5)]))
        >>> torch.linalg.vector_norm(tensor).square().round(decimals=3)
        tensor(0.8000)

    Paper: Ahn, Xu, "Dion: Distributed Orthonormalized Updates", 2025.
    """

    matrix_rank: int = 16
    momentum: float = 0.95
    seed: int = 0

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", momentum=self.momentum)

    def state(self) -> tuple[State, ...]:
        """The momenta of this rank, free of the scale of the loss, and the thin matrices, equal on all ranks."""
        return (State("momentum"), State("right_factors", self._first_factors, per="flat", scope="shared"))

    def _columns_of(self, block: MatrixBlock) -> int:
        return min(block.rows, block.columns)

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``. What is left out remains in the momenta."""
        assert remainder is None, "what is lost stays here"
        exact, scale, blocks = summing_dtype(flat.dtype), memory.loss_scale, self.factored(memory)
        values = memory.buffer("values", flat.numel(), exact).copy_(flat)
        momentum = memory.propose("momentum").copy_(memory.state["momentum"]).add_(values, alpha=1 / scale)
        rests = between_blocks(blocks, flat.numel())
        for rest in rests:
            momentum[rest].zero_()
        tall = [_tall(momentum, block) for block in blocks]
        left = self._left_factors(tall, [values[rest] for rest in rests], communicator, memory)
        products = [torch.mm(a.t(), matrix).t() for matrix, a in zip(tall, left, strict=True)]
        right = _summed(products, communicator, memory)
        units = memory.propose("right_factors").split_with_sizes([one.shape[1] for one in tall])
        for block, matrix, a, r, unit in zip(blocks, tall, left, right, units, strict=True):
            matrix.addmm_(a, r.t(), alpha=-(1 - self.momentum) / communicator.size)
            torch.div(r, torch.linalg.vector_norm(r, dim=0, keepdim=True).add_(_EPSILON), out=unit)
            direction = torch.mm(a, unit.t()).mul_(scale * math.sqrt(block.rows / block.columns))
            _tall(values, block).copy_(direction)
        flat.copy_(values)


def _tall(flat: torch.Tensor, block: MatrixBlock) -> torch.Tensor:
    """A matrix of ``flat`` with at least as many rows as columns."""
    matrix = flat[block.offset : block.offset + block.numel].view(block.rows, block.columns)
    return matrix if block.rows >= block.columns else matrix.t()


def _summed(parts: Sequence[torch.Tensor], communicator: Communicator, memory: ReducerMemory) -> list[torch.Tensor]:
    """The sums of ``parts`` over all ranks, in one message."""
    sizes = [part.numel() for part in parts]
    message = memory.buffer("right", sum(sizes), memory.state["right_factors"].dtype)
    for piece, part in zip(message.split_with_sizes(sizes), parts, strict=True):
        piece.view(part.shape).copy_(part)
    communicator.allreduce(message)
    return [piece.view(part.shape) for piece, part in zip(message.split_with_sizes(sizes), parts, strict=True)]
