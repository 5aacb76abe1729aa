"""Synchronous training: every rank steps with the gradient of the whole batch.

Then what algorithms have in common that sum gradients with a reducer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Model
from bagua.algorithms.exchanges.values import Gradients, Mean, Replace, Sum
from bagua.checks import check_flags, check_whole
from bagua.primitives import SumReducer

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


@dataclass(frozen=True)
class ReducedGradients(ByHost):
    """Replace each gradient by what a reducer makes of its sum over all ranks; subclasses name the reducer.

    Args:
        hierarchical: sum inside each host in full precision, and use the reducer between hosts.
            With a single host, or a single rank on each, it is used between all ranks.
        average: divide by the number of ranks.
        warmup_steps: sum exactly in so many steps at the beginning.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.
    """

    hierarchical: bool = True
    average: bool = True
    _: KW_ONLY
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical, average=self.average)
        check_whole(0, warmup_steps=self.warmup_steps)
        _ = self.reducer  # Refuses options that it cannot use.

    @property
    @abstractmethod
    def reducer(self) -> SumReducer:
        """What sums the gradients."""

    def reducer_in(self, phase: Hashable) -> SumReducer | None:
        """What sums the gradients in this phase; None for the exact sum."""
        return None if phase == "warm-up" else self.reducer

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Warm-up, if there is one, and what comes after it."""
        return ("warm-up", "reduced") if self.warmup_steps else ("reduced",)

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step."""
        return "warm-up" if step < self.warmup_steps else "reduced"

    def exchanges(self, phase: Hashable = "reduced") -> tuple[Exchange, ...]:
        """Sum the gradients where they lie: exactly in the warm-up."""
        kind = Mean if self.average else Sum
        how = kind(self.reducer_in(phase), self.hierarchical)
        return (Exchange(Gradients(), Every(), how, Replace()),)
