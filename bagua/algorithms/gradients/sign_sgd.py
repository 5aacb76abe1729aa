"""Synchronous training that sends one bit for each element of a gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from bagua.algorithms.base import bound_form
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.compression import Sign
from bagua.primitives import AllGatherReducer, ErrorFeedback, SumReducer


@dataclass(frozen=True)
class SignSGDAlgorithm(ReducedGradients):
    """Replace each gradient by the mean of scaled signs; what is lost is added to the next gradient.

    ``x_i = g_i + e_i``; ``g_i <- (1 / n) sum_j Sign(x_j)``; ``e_i <- x_i - Sign(x_i)``, where ``Sign`` is the sign
    times the mean magnitude of each ``block_numel`` elements. Every rank sends one bit for each element, and a number
    for each block, to each of the others.

    With the defaults it keeps the loss of full gradients at their learning rate. Larger blocks send up to a fifth less,
    and lose more; so does a shorter warm-up.

    Args:
        hierarchical: sum inside each host in full precision, and take signs between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.
        block_numel: elements that share a magnitude, a multiple of 8.

    Raises:
        ConfigurationError: an option out of its range.

    Example:
        >>> SignSGDAlgorithm(block_numel=256)
        SignSGDAlgorithm(hierarchical=True, average=True, warmup_steps=150, block_numel=256)

    Paper: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019.
    """

    warmup_steps: int = field(default=150, kw_only=True)
    block_numel: int = 64

    @property
    def reducer(self) -> SumReducer:
        """Allgather of signs with error feedback."""
        return ErrorFeedback(AllGatherReducer(Sign(self.block_numel)))


SignSGDAlgorithmImpl = bound_form(SignSGDAlgorithm)
