"""Synchronous training with gradients of low rank."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import bound_form
from bagua.algorithms.reduced import ReducedGradients
from bagua.primitives import ErrorFeedback, PowerSGDReducer, SumReducer

__all__ = ["PowerSGDAlgorithm", "PowerSGDAlgorithmImpl"]


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

    Raises:
        ConfigurationError: an option out of its range.

    Example:
        >>> PowerSGDAlgorithm(matrix_rank=2)
        PowerSGDAlgorithm(hierarchical=True, average=True, warmup_steps=0, matrix_rank=2)

    Paper: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019.
    """

    matrix_rank: int = 4

    @property
    def reducer(self) -> SumReducer:
        """A power iteration with error feedback."""
        return ErrorFeedback(PowerSGDReducer(self.matrix_rank))


PowerSGDAlgorithmImpl = bound_form(PowerSGDAlgorithm)
