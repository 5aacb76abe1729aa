"""Synchronous training: every rank steps with the gradient of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Traits
from bagua.buckets import Bucket
from bagua.checks import check_flags
from bagua.comm import ProcessGroup, Work
from bagua.primitives import allreduce_sum

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(Algorithm):
    """Replace each gradient by its mean (or sum) over all ranks: ``g_i <- (1 / n) sum_j g_j``.

    Args:
        hierarchical: sum inside each host first, then between hosts. The mean over ranks
            stays exact when hosts are of different size.
        average: divide by the number of ranks. Without it, several backward passes between
            two ``zero_grad()`` must be in ``no_sync()`` except the last: what was summed over
            ranks and is still there would be summed again.

    Raises:
        InvalidTypeError: an option that is neither True nor False.

    Example:
        >>> GradientAllReduceAlgorithm(hierarchical=True)
        GradientAllReduceAlgorithm(hierarchical=True, average=True)
    """

    hierarchical: bool = False
    average: bool = True

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical, average=self.average)


class GradientAllReduceAlgorithmImpl(AlgorithmImpl, declaration=GradientAllReduceAlgorithm):
    """``GradientAllReduceAlgorithm`` on a group."""

    traits = Traits(result="exact")
    options: GradientAllReduceAlgorithm

    @property
    def gradient_scale(self) -> float:
        """Dividing before the sum keeps 16-bit gradients in range."""
        return 1.0 / self.process_group.size if self.options.average else 1.0

    @property
    def blocking(self) -> bool:
        """Only with several calls, one after the other."""
        return self.options.hierarchical

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Sum the gradients where they lie."""
        gradients = bucket.allocate_gradients()
        return allreduce_sum(gradients, group, hierarchical=self.options.hierarchical, async_op=True)
