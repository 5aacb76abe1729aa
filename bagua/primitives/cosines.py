"""A reducer that reduces the coefficients of cosine transforms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua.checks import check_kind
from bagua.comm import Communicator
from bagua.compression import check_side, from_coefficients, to_coefficients
from bagua.primitives.memory import ReducerMemory, State
from bagua.primitives.reducers import SumReducer


@dataclass(frozen=True)
class CosineReducer(SumReducer):
    """The tensor whose coefficients are what ``reducer`` makes of those of all ranks.

    The coefficients are those of ``DCTTopK``: of blocks of ``side`` x ``side`` elements that follow each other, in
    single precision at least. A reducer that looks at single elements, as ``ContributorsReducer``, then looks at single
    coefficients.

    Args:
        reducer: any other reducer, without error feedback, which belongs around this one.
        side: side of a block, a multiple of 4.

    Raises:
        ConfigurationError: ``side`` cannot be one.
        InvalidTypeError: ``reducer`` is none.

    Example:
        >>> from bagua.compression import BlockTopK
        >>> from bagua.primitives import AllGatherReducer
        >>> CosineReducer(AllGatherReducer(BlockTopK(16, 2)), side=4).side
        4

    Paper: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024.
    """

    reducer: SumReducer
    side: int = 64

    def __post_init__(self) -> None:
        check_kind(SumReducer, "a SumReducer", reducer=self.reducer)
        check_side(self.side)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the inner reducer refuses."""
        self.reducer.check_dtype(torch.promote_types(dtype, torch.float32))

    def state(self) -> tuple[State, ...]:
        """That of the inner reducer."""
        return self.reducer.state()

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``."""
        coefficients = to_coefficients(flat, self.side)
        lost = None if remainder is None else torch.empty_like(coefficients)
        self.reducer.reduce(coefficients, communicator, memory, lost)
        flat.copy_(from_coefficients(coefficients, self.side, flat.numel()))
        if remainder is not None and lost is not None:
            remainder.copy_(from_coefficients(lost, self.side, flat.numel()))
