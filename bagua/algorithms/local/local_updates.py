"""What algorithms have in common that let ranks train alone for many steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass

from bagua.algorithms.base import Algorithm
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.values import WHOLE, Buffers, Gradients, Mean, Replace
from bagua.checks import check_flags, check_whole

__all__ = ["LocalUpdates"]

_TOGETHER, _ALONE = "together", "alone"


@dataclass(frozen=True)
class LocalUpdates(Algorithm):
    """Ranks step with their own gradients, and exchange weights after every ``sync_every``-th step.

    Args:
        sync_every: steps from one exchange to the next.
        start_after: so many steps at the beginning exchange gradients instead, as ``gradient_allreduce`` does.
        hierarchical: sum inside each host first, so that each link between hosts carries the weights once.
        average_buffers: floating-point buffers, as running means, become their means after each ``sync_every``-th step.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.
    """

    sync_every: int = 8
    _: KW_ONLY
    start_after: int = 0
    hierarchical: bool = True
    average_buffers: bool = False

    def __post_init__(self) -> None:
        check_whole(1, sync_every=self.sync_every)
        check_whole(0, start_after=self.start_after)
        check_flags(hierarchical=self.hierarchical, average_buffers=self.average_buffers)
        _ = self.outer_exchange  # Refuses options that it cannot use.

    @property
    @abstractmethod
    def outer_exchange(self) -> Exchange:
        """What ranks exchange after each ``sync_every``-th step."""

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Steps together, if there are such, and steps alone."""
        return (_TOGETHER, _ALONE) if self.start_after else (_ALONE,)

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step."""
        return _TOGETHER if step < self.start_after else _ALONE

    def exchanges(self, phase: Hashable = _ALONE) -> tuple[Exchange, ...]:
        """Gradients in each step at the beginning; weights every so often after that."""
        if phase == _TOGETHER:
            return (Exchange(Gradients(), Every(), Mean(hierarchical=self.hierarchical), Replace(), label="gradients"),)
        if not self.average_buffers:
            return (self.outer_exchange,)
        when, how = Every(self.sync_every), Mean(hierarchical=self.hierarchical)
        return (self.outer_exchange, Exchange(Buffers(), when, how, Replace(), parts=WHOLE, label="buffers"))
