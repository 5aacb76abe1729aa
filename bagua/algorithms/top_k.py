"""Synchronous training that sends the largest elements of a gradient only."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import bound_form
from bagua.algorithms.reduced import ReducedGradients
from bagua.compression import TopK
from bagua.primitives import AllGatherReducer, ErrorFeedback, SumReducer

__all__ = ["TopKAlgorithm", "TopKAlgorithmImpl"]


@dataclass(frozen=True)
class TopKAlgorithm(ReducedGradients):
    """Replace each gradient by the mean of everyone's largest elements; the others are added to the next gradient.

    ``x_i = g_i + e_i``; ``g_i <- (1 / n) sum_j TopK(x_j)``; ``e_i <- x_i - TopK(x_i)``, where ``TopK`` keeps the part
    ``ratio`` of a bucket's elements that is largest in magnitude, and makes the others zero.

    Args:
        hierarchical: sum inside each host in full, and choose elements between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.
        ratio: part of the elements that each rank sends, above 0 and at most 1.

    Raises:
        ConfigurationError: an option out of its range.

    Example:
        >>> TopKAlgorithm(ratio=0.05)
        TopKAlgorithm(hierarchical=True, average=True, warmup_steps=0, ratio=0.05)

    Paper: Stich, Cordonnier, Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    ratio: float = 0.01

    @property
    def reducer(self) -> SumReducer:
        """Allgather of the largest elements with error feedback."""
        return ErrorFeedback(AllGatherReducer(TopK(self.ratio)))


TopKAlgorithmImpl = bound_form(TopKAlgorithm)
