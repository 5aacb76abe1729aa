"""Synchronous training in which each rank adds up one slice of each bucket."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, How
from bagua.algorithms.exchanges.values import Gradients, Replace
from bagua.checks import check_flags
from bagua.comm import ProcessGroup
from bagua.primitives import scatter_gather_sum, sum_over


@dataclass(frozen=True)
class ScatterGatherSum(How):
    """The sum over all ranks, each of which adds up one slice.

    Args:
        hierarchical: sum inside each host first.
        average: divide by the number of ranks.
    """

    hierarchical: bool = False
    average: bool = True

    chunked: ClassVar[bool] = True
    side_by_side: ClassVar[bool] = True

    def scale(self, group: ProcessGroup) -> float:
        """Dividing before the sum keeps 16-bit values in range."""
        return 1.0 / group.size if self.average else 1.0

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Sum what lies in the flight. Slices of equal size need no copies."""
        scratch = flight.scratch("received")
        sum_over(
            flight.flat,
            group,
            lambda flat, ranks: scatter_gather_sum(flat, ranks, scratch),
            hierarchical=self.hierarchical,
        )


@dataclass(frozen=True)
class ScatterGatherAllReduceAlgorithm(ByHost):
    """Replace each gradient by its mean over all ranks, each of which adds up one slice: ``g_i <- (1 / n) sum_j g_j``.

    An all-to-all, a sum in rank order and in single precision at least, and an allgather: what
    compressed forms do, without the compression. 16-bit sums are rounded once.

    Args:
        hierarchical: sum inside each host first, then between hosts.
        average: divide by the number of ranks.

    Raises:
        InvalidTypeError: an option that is neither True nor False.

    Example:
        >>> ScatterGatherAllReduceAlgorithm(hierarchical=False)
        ScatterGatherAllReduceAlgorithm(hierarchical=False, average=True)
    """

    hierarchical: bool = True
    average: bool = True

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical, average=self.average)

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Sum the gradients where they lie."""
        how = ScatterGatherSum(self.hierarchical, self.average)
        return (Exchange(Gradients(), Every(), how, Replace()),)


ScatterGatherAllReduceAlgorithmImpl = bound_form(ScatterGatherAllReduceAlgorithm)
