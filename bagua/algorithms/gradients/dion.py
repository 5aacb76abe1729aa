"""Steps along orthonormal directions of low rank of the momenta of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, Model, Then
from bagua.algorithms.exchanges.values import Gradients, Mean
from bagua.checks import check_flags, check_kind
from bagua.errors import ConfigurationError
from bagua.optim import DionOptimizer
from bagua.primitives import DionReducer


@dataclass(frozen=True)
class DionAlgorithm(ByHost):
    """Step matrices along orthonormal directions of low rank of everyone's momenta; send two thin matrices for each.

    The rule of ``DionOptimizer``, with the mean over ranks of ``M_i Q`` and ``transpose(M_i) P``; see ``DionReducer``.
    Momenta ``M_i`` belong to their ranks, ``Q`` is equal on all: save ``bagua_state_dict()`` on each. Everything that
    is no large matrix is averaged exactly, and stepped by the AdamW of ``DionOptimizer``. Do not clip gradients: those
    of matrices are directions.

    Args:
        hierarchical: sum inside each host exactly, and approximate between hosts only.
        matrix_rank: columns of the thin matrices; that of the optimizer.
        momentum: part of a direction that is kept, from 0 and less than 1; that of the optimizer.
        seed: seed of the first ``Q``; equal on all ranks.

    Raises:
        ConfigurationError: an option out of its range; when a model is wrapped: a parameter that no ``DionOptimizer``
            of the same ``matrix_rank`` and ``momentum`` steps.

    Example:
        >>> DionAlgorithm(matrix_rank=32)
        DionAlgorithm(hierarchical=True, matrix_rank=32, momentum=0.95, seed=0)

    Paper: Ahn, Xu, "Dion: Distributed Orthonormalized Updates", 2025.
    """

    hierarchical: bool = True
    _: KW_ONLY
    matrix_rank: int = 16
    momentum: float = 0.95
    seed: int = 0

    optimizer_class: ClassVar[Callable[..., torch.optim.Optimizer] | None] = DionOptimizer

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        _ = self.reducer  # Refuses options that it cannot use.

    @property
    def reducer(self) -> DionReducer:
        """A power iteration on momenta."""
        return DionReducer(self.matrix_rank, self.momentum, self.seed)

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Directions take the place of the gradients of matrices."""
        how = Mean(self.reducer, self.hierarchical)
        return (Exchange(Gradients(), Every(), how, DirectionsToOptimizer(self.reducer)),)

    def check(self, model: Model) -> None:
        """Refuse optimizers that do not step along directions."""
        for name, parameter in model.parameters.items():
            owner = model.owner_of(parameter)
            if owner is None or not isinstance(owner[0], DionOptimizer):
                raise self._refused(f"no DionOptimizer steps {name}", [type(one).__name__ for one in model.optimizers])
        for one in model.optimizers:
            if isinstance(one, DionOptimizer) and (one.matrix_rank, one.momentum) != (self.matrix_rank, self.momentum):
                seen = f"matrix_rank={one.matrix_rank}, momentum={one.momentum}"
                raise self._refused("the optimizer has another rank or momentum than the algorithm", seen)

    def _refused(self, problem: str, seen: object) -> ConfigurationError:
        options = f"matrix_rank={self.matrix_rank}, momentum={self.momentum}"
        return ConfigurationError(
            problem,
            argument="optimizers",
            expected=f"a DionOptimizer of all trainable parameters, with {options}",
            seen=seen,
            advice=f"Build bagua.optim.DionOptimizer(model.parameters(), {options}) and wrap the model with it.",
        )


@dataclass(frozen=True)
class DirectionsToOptimizer(Then):
    """The result takes the place of the gradients, and the optimizer is told which of them are directions."""

    reducer: DionReducer

    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_kind(DionReducer, "a DionReducer", reducer=self.reducer)

    def fold(self, flight: Flight) -> None:
        """Tell it; the result lies where the gradients do."""
        directed = {block.offset for block in self.reducer.factored(flight.memory)}
        for parameter, offset in zip(flight.bucket.parameters, flight.bucket.offsets, strict=True):
            owner = flight.model.owner_of(parameter)
            if offset in directed and owner is not None and isinstance(owner[0], DionOptimizer):
                owner[0].note_direction(parameter)


DionAlgorithmImpl = bound_form(DionAlgorithm)
