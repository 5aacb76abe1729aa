"""Synchronous training with gradients of low rank."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Flight, Then
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.checks import check_numbers
from bagua.primitives import ErrorFeedback, PowerSGDReducer, State, SumReducer


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


PowerSGDAlgorithmImpl = bound_form(PowerSGDAlgorithm)
