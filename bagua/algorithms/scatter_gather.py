"""Synchronous training in which each rank adds up one slice of each bucket."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucketing, Traits
from bagua.buckets import Bucket
from bagua.checks import check_flags
from bagua.comm import ProcessGroup
from bagua.primitives import scatter_gather_sum

__all__ = ["ScatterGatherAllReduceAlgorithm", "ScatterGatherAllReduceAlgorithmImpl"]


@dataclass(frozen=True)
class ScatterGatherAllReduceAlgorithm(Algorithm):
    """Replace each gradient by its mean over all ranks, each of which adds up one slice: ``g_i <- (1 / n) sum_j g_j``.

    An all-to-all, a sum in rank order and in single precision at least, and an allgather: what
    compressed forms do, without the compression. 16-bit sums are rounded once.

    Args:
        hierarchical: sum inside each host first, then between hosts.
        average: divide by the number of ranks.

    Raises:
        InvalidTypeError: an option that is neither True nor False.

    Example:
        >>> Algorithm.init("sg-allreduce", hierarchical=False)
        ScatterGatherAllReduceAlgorithm(hierarchical=False, average=True)
    """

    hierarchical: bool = True
    average: bool = True

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical, average=self.average)


class ScatterGatherAllReduceAlgorithmImpl(AlgorithmImpl, declaration=ScatterGatherAllReduceAlgorithm):
    """``ScatterGatherAllReduceAlgorithm`` on a group."""

    traits = Traits(result="exact")
    options: ScatterGatherAllReduceAlgorithm

    @property
    def gradient_scale(self) -> float:
        """Dividing before the sum keeps 16-bit gradients in range."""
        return 1.0 / self.process_group.size if self.options.average else 1.0

    def bucketing(self, step: int) -> Bucketing:
        """Slices of equal size need no copies."""
        return Bucketing(chunked=True)

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        """Sum the gradients where they lie."""
        gradients, scratch = bucket.allocate_gradients(), bucket.buffer("received")
        scatter_gather_sum(gradients, group, scratch, hierarchical=self.options.hierarchical)
