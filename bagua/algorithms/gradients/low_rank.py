"""Synchronous training with what matrices of low rank say: of the gradients, or of the momenta of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

import torch

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, Model, Then
from bagua.algorithms.exchanges.values import Gradients, Mean
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.checks import check_flags, check_kind, check_numbers
from bagua.errors import ConfigurationError
from bagua.optim import DionOptimizer
from bagua.primitives import DionReducer, ErrorFeedback, PowerSGDReducer, State, SumReducer


@dataclass(frozen=True)
class PowerSGDAlgorithm(ReducedGradients):
    """Replace the mean of the gradient of each matrix by one of low rank; what is lost is added to the next gradient.

    See ``PowerSGDReducer`` for the update rule. Biases, and matrices too small to gain from it,
    are averaged exactly. Large layers send less than a hundredth of their size.

    Args:
        hierarchical: sum inside each host exactly, and approximate between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.
        matrix_rank: rank of the approximation; more costs more, and is more exact.
        momentum: with ``D`` the result, ``m <- momentum m + D``, and the gradient becomes ``D + m``, as in the paper;
            from 0 and less than 1. Use an optimizer without momentum then. None for that of the optimizer.

    Raises:
        ConfigurationError: an option out of its range.

    Example:
        >>> PowerSGDAlgorithm(matrix_rank=2)
        PowerSGDAlgorithm(hierarchical=True, average=True, warmup_steps=0, matrix_rank=2, momentum=None)

    Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019.
    """

    matrix_rank: int = 4
    momentum: float | None = None

    @property
    def reducer(self) -> SumReducer:
        """A power iteration with error feedback."""
        return ErrorFeedback(PowerSGDReducer(self.matrix_rank))

    def exchanges(self, phase: Hashable = "reduced") -> tuple[Exchange, ...]:
        """Sum the gradients where they lie, and add the momentum."""
        found = super().exchanges(phase)
        return found if self.momentum is None else tuple(replace(one, then=Accelerate(self.momentum)) for one in found)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum is not None:
            _ = Accelerate(self.momentum)


@dataclass(frozen=True)
class Accelerate(Then):
    """The gradient becomes the result plus its momentum: ``m <- momentum m + D``; ``g <- D + m``.

    A result that is not finite leaves the momentum as it is.

    Args:
        momentum: from 0 and less than 1.
    """

    momentum: float

    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", momentum=self.momentum)

    def state(self) -> tuple[State, ...]:
        """The momentum, free of the scale of the loss."""
        return (State("momentum", scope="shared"),)

    def fold(self, flight: Flight) -> None:
        """Add the momentum where the gradients lie."""
        momentum = flight.memory.propose("momentum")
        momentum.copy_(flight.state["momentum"]).mul_(self.momentum)
        momentum.add_(flight.flat, alpha=1 / flight.loss_scale)
        flight.memory.settle(flight.flat)
        flight.flat.add_(momentum, alpha=flight.loss_scale)


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


PowerSGDAlgorithmImpl = bound_form(PowerSGDAlgorithm)
DionAlgorithmImpl = bound_form(DionAlgorithm)
