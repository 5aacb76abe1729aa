"""Synchronous training: every rank steps with the gradient of the whole batch."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.values import Gradients, Mean, Replace, Sum
from bagua.checks import check_flags

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]


@dataclass(frozen=True)
class GradientAllReduceAlgorithm(ByHost):
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

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Sum the gradients where they lie."""
        how = Mean(hierarchical=self.hierarchical) if self.average else Sum(hierarchical=self.hierarchical)
        return (Exchange(Gradients(), Every(), how, Replace()),)


GradientAllReduceAlgorithmImpl = bound_form(GradientAllReduceAlgorithm)
