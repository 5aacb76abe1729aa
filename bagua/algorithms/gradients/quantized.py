"""Synchronous training that sends one byte for each element of a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import bound_form
from bagua.algorithms.gradients.gradient_allreduce import ReducedGradients
from bagua.compression import MinMaxUInt8
from bagua.primitives import ScatterGatherReducer, SumReducer


@dataclass(frozen=True)
class ByteGradAlgorithm(ReducedGradients):
    """Replace each gradient by its mean over all ranks, rounded twice to 8 bits: ``g_i <- Q((1 / n) sum_j Q(g_j))``.

    ``Q`` is ``MinMaxUInt8``: one byte for each element and one range for each 2048 of them. A
    quarter of the bytes of a float32 allreduce, for an error of about 1 % of a gradient.

    Args:
        hierarchical: sum inside each host in full precision, and round between hosts only.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.

    Example:
        >>> ByteGradAlgorithm(hierarchical=False)
        ByteGradAlgorithm(hierarchical=False, average=True, warmup_steps=0)

    Paper: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2022.
    """

    @property
    def reducer(self) -> SumReducer:
        """Scatter-gather of bytes."""
        return ScatterGatherReducer(MinMaxUInt8())


ByteGradAlgorithmImpl = bound_form(ByteGradAlgorithm)
