"""Reducers that approximate matrices, or their momenta, by products of two thin ones."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.checks import check_kind, check_numbers, check_whole
from bagua.comm import Communicator
from bagua.primitives.reducers import MatrixBlock, ReducerMemory, Remainder, State, SumReducer, summing_dtype


class LowRankReducer(SumReducer):
    """What reducers have in common that send a matrix as a product of two thin ones, its factors."""

    matrix_rank: int
    seed: int

    def __post_init__(self) -> None:
        check_whole(1, matrix_rank=self.matrix_rank)
        check_kind(int, "a whole number", seed=self.seed)

    def factored(self, memory: ReducerMemory) -> list[MatrixBlock]:
        """The matrices whose factors have fewer elements."""
        rank = self.matrix_rank
        return [block for block in memory.blocks if (block.rows + block.columns) * rank < block.numel]

    def _columns_of(self, block: MatrixBlock) -> int:
        return block.columns

    def _first_factors(self, memory: ReducerMemory) -> torch.Tensor:
        columns = sum(map(self._columns_of, self.factored(memory)))
        generator = torch.Generator().manual_seed(self.seed)
        factors = torch.randn(
            columns, self.matrix_rank, generator=generator, dtype=summing_dtype(memory.dtype), device="cpu"
        )
        return factors.to(memory.device)

    def _left_factors(
        self,
        matrices: Sequence[torch.Tensor],
        rests: Sequence[torch.Tensor],
        communicator: Communicator,
        memory: ReducerMemory,
    ) -> list[torch.Tensor]:
        """Orthonormal columns for each matrix, equal on all ranks; the rests are replaced by their sums."""
        rank, state = self.matrix_rank, memory.state["right_factors"]
        right = state.split_with_sizes([matrix.shape[1] for matrix in matrices])
        sizes = [len(matrix) * rank for matrix in matrices] + [rest.numel() for rest in rests]
        message = memory.buffer("left", sum(sizes), state.dtype)
        parts = message.split_with_sizes(sizes)
        products = [part.view(-1, rank) for part in parts[: len(matrices)]]
        for matrix, b, product in zip(matrices, right, products, strict=True):
            torch.mm(matrix, b, out=product)
        for rest, part in zip(rests, parts[len(matrices) :], strict=True):
            part.copy_(rest)
        communicator.allreduce(message)
        for rest, part in zip(rests, parts[len(matrices) :], strict=True):
            rest.copy_(part)
        return [orthonormal(product) for product in products]


@dataclass(frozen=True)
class PowerSGDReducer(LowRankReducer):
    """One step of a power iteration for each matrix; everything else in the tensor is summed exactly.

    For matrices ``M_i`` (rows x columns), with ``B`` (columns x ``matrix_rank``) from the call before::

        A <- orthonormal columns of sum_i M_i B
        B <- sum_i transpose(M_i) A
        result = A transpose(B);  lost on rank i: M_i - A transpose(A) M_i

    The left factors of all matrices, with all that is no matrix, travel in one allreduce, the
    right factors in a second one. A matrix is left as it is where that takes fewer elements.

    Args:
        matrix_rank: columns of the thin matrices.
        seed: seed of the first ``B``; equal on all ranks.

    Raises:
        ConfigurationError: ``matrix_rank`` is no positive integer.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.primitives import MatrixBlock
        >>> communicator = solo_group().global_communicator
        >>> tensor = torch.outer(torch.arange(4.0), torch.arange(5.0)).view(-1)
        >>> reducer, expected = PowerSGDReducer(matrix_rank=1), tensor.clone()
        >>> reducer.reduce(tensor, communicator, reducer.memory(communicator, tensor, [MatrixBlock(0, 4, 5)]))
        >>> torch.allclose(tensor, expected, atol=1e-5)
        True

    Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019.
    """

    matrix_rank: int = 4
    seed: int = 0
    contraction = 0.0  # All of a matrix may be orthogonal to its factors.

    def state(self) -> tuple[State, ...]:
        """The right factors, one below the other, equal on all ranks."""
        return (State("right_factors", self._first_factors, per="flat", scope="shared"),)

    def reduce(
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
    ) -> None:
        """See ``SumReducer.reduce``."""
        exact = summing_dtype(flat.dtype)
        values = flat if flat.dtype == exact else memory.buffer("values", flat.numel(), exact).copy_(flat)
        blocks = self.factored(memory)
        matrices = [values[b.offset : b.offset + b.numel].view(b.rows, b.columns) for b in blocks]
        rests = [values[part] for part in between_blocks(blocks, flat.numel())]

        left = self._left_factors(matrices, rests, communicator, memory)
        # Half the time of transpose(M) A.
        own = [torch.mm(a.t(), matrix).t() for matrix, a in zip(matrices, left, strict=True)]
        total = _summed(own, communicator, memory)
        factors = memory.propose("right_factors").split_with_sizes([len(b) for b in total])
        for b, factor in zip(total, factors, strict=True):
            torch.div(b, memory.loss_scale, out=factor)
        if remainder is not None:
            remainder.zero_()
            for block, matrix, a, b in zip(blocks, matrices, left, own, strict=True):
                lost = remainder[block.offset : block.offset + block.numel].view(block.rows, block.columns)
                torch.addmm(matrix, a, b.t(), alpha=-1, out=lost)
        for matrix, a, b in zip(matrices, left, total, strict=True):
            torch.mm(a, b.t(), out=matrix)
        if values is not flat:
            flat.copy_(values)


def between_blocks(blocks: list[MatrixBlock], numel: int) -> list[slice]:
    """What is in no block, in order."""
    bounds = [0, *(bound for block in blocks for bound in (block.offset, block.offset + block.numel)), numel]
    return [slice(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if stop > start]


_loading = threading.Lock()


@functools.cache
def _load_cuda_linalg(device: torch.device) -> None:
    """Torch loads it in the first call, and fails where two threads make their first call at a time."""
    with _loading:
        torch.linalg.qr(torch.ones(1, 1, device=device))


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span those of ``matrix``; any, where these are not independent.

    A rank that decomposes the same numbers finds the same columns. A decomposition of zeros
    gives columns of the identity, so a matrix that was zero once does not stay zero.
    """
    if matrix.is_cuda:
        _load_cuda_linalg(matrix.device)
    columns: torch.Tensor = torch.linalg.qr(matrix).Q
    return columns


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
        self, flat: torch.Tensor, communicator: Communicator, memory: ReducerMemory, remainder: Remainder = None
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
