"""Synchronous training that sends one bit for each element of a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import bound_form
from bagua.algorithms.reduced import ReducedGradients
from bagua.compression import Sign
from bagua.primitives import AllGatherReducer, ErrorFeedback, SumReducer

__all__ = ["SignSGDAlgorithm", "SignSGDAlgorithmImpl"]


@dataclass(frozen=True)
class SignSGDAlgorithm(ReducedGradients):
    """Replace each gradient by the mean of scaled signs; what is lost is added to the next gradient.

    ``x_i = g_i + e_i``; ``g_i <- (1 / n) sum_j Sign(x_j)``; ``e_i <- x_i - Sign(x_i)``, where ``Sign`` is the sign
    times the mean magnitude of each 2048 elements. Every rank receives ``n`` bits for each element.

    Args:
        hierarchical: sum inside each host in full precision, and take signs between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.

    Example:
        >>> SignSGDAlgorithm(warmup_steps=100)
        SignSGDAlgorithm(hierarchical=True, average=True, warmup_steps=100)

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    @property
    def reducer(self) -> SumReducer:
        """Allgather of signs with error feedback."""
        return ErrorFeedback(AllGatherReducer(Sign()))


SignSGDAlgorithmImpl = bound_form(SignSGDAlgorithm)
