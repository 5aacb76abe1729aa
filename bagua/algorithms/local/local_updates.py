"""What algorithms have in common that let ranks train alone for many steps."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from bagua.algorithms.base import Algorithm, ByHost, DistributedAlgorithm, as_algorithm
from bagua.algorithms.exchanges.exchange import WHOLE, Every, Exchange
from bagua.algorithms.exchanges.fields import Model
from bagua.algorithms.exchanges.values import Buffers, Mean, Replace, Sum
from bagua.checks import check_choice, check_flags, check_kind, check_whole
from bagua.errors import ConfigurationError
from bagua.primitives import SumReducer

PaceChoice = Literal["equal", "own"]
_TOGETHER, _ALONE = "together", "alone"


@dataclass(frozen=True)
class LocalUpdates(ByHost):
    """Ranks step with their own gradients, and exchange weights after every ``sync_every``-th step.

    Args:
        sync_every: steps from one exchange to the next.
        start_after: so many steps at the beginning exchange gradients instead.
        start_with: an algorithm that sums gradients in each of these steps, as ``power_sgd`` on slow links.
        hierarchical: sum inside each host first, so that each link between hosts carries the weights once.
        average_buffers: floating-point buffers, as running means, become their means after each ``sync_every``-th step.
        inner: exchange of the ranks of one host in each step, as ``gradient_allreduce``: hosts then train alone, each
            as one rank would, and one rank of each takes part in the exchanges between them. None: ranks train alone.
        pace: ``equal``: all make ``sync_every`` steps. ``own``, between islands: the fastest island makes so many, and
            the others those that they can make meanwhile, so that no island waits; what each has learned counts by the
            tokens, or steps, behind it. See ``bagua.membership``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range; when the model is wrapped, ``own`` without
            ``between=islands``.
    """

    sync_every: int = 8
    _: KW_ONLY
    start_after: int = 0
    start_with: Algorithm | str = "gradient_allreduce"
    hierarchical: bool = True
    average_buffers: bool = False
    inner: Algorithm | str | None = None
    pace: PaceChoice = "equal"

    def __post_init__(self) -> None:
        check_whole(1, sync_every=self.sync_every)
        check_choice(get_args(PaceChoice), pace=self.pace)
        if self.pace == "own" and self.start_after:
            raise ConfigurationError(
                "steps that all make together have one pace",
                argument="start_after",
                expected="0 with pace='own'",
                seen=self.start_after,
            )
        check_whole(0, start_after=self.start_after)
        check_flags(hierarchical=self.hierarchical, average_buffers=self.average_buffers)
        object.__setattr__(self, "start_with", _summing(start_with=self.start_with))
        if not self.start_after and self.start_with != as_algorithm("gradient_allreduce"):
            raise ConfigurationError(
                "no steps begin the training", argument="start_with", expected="start_after=N", seen=self.start_with
            )
        if self.inner is not None:
            object.__setattr__(self, "inner", _summing(inner=self.inner))
            if not self.hierarchical:
                raise ConfigurationError(
                    "with inner, hosts exchange in place of ranks", argument="hierarchical", expected=True, seen=False
                )
        _ = self.outer_exchange  # Refuse options that they cannot use.

    def check(self, model: Model) -> None:
        """Refuse a pace of its own where no islands agree on it, and what the inner algorithm refuses."""
        if self.pace == "own":
            raise ConfigurationError(
                "ranks of one group make the same steps: only islands agree on a pace for each",
                argument="pace",
                expected="with_bagua(..., between=islands), or pace='equal'",
                seen=self.pace,
            )
        for one in (self.inner, self.start_with if self.start_after else None):
            if isinstance(one, Algorithm):
                one.check(model)

    @property
    def is_hierarchical(self) -> bool | None:
        """Whether hosts exchange in place of ranks; None if that cannot be chosen, because hosts are what trains."""
        return self.hierarchical if self.inner is None else None

    def mean(self, reducer: SumReducer | None = None) -> Mean:
        """The mean of what trains alone: ranks, or hosts.

        Args:
            reducer: None for the exact mean.
        """
        return Mean(reducer, self.hierarchical) if self.inner is None else Mean(reducer, over="between")

    @property
    def _inside(self) -> tuple[Exchange, ...]:
        """What ranks of one host exchange in each step."""
        if self.inner is None:
            return ()
        assert isinstance(self.inner, Algorithm)
        found = self.inner.every_exchange()
        return tuple(_labelled(one, "inner", hierarchical=False, over="inside") for one in found)

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
            assert isinstance(self.start_with, Algorithm)
            found = self.start_with.every_exchange()
            return tuple(_labelled(one, "gradients", hierarchical=self.hierarchical) for one in found)
        found = (*self._inside, self.outer_exchange)
        if not self.average_buffers:
            return found
        # Hosts hold equal weights, but each rank has buffers of its own.
        when, how = Every(self.sync_every), Mean(hierarchical=self.hierarchical)
        return (*found, Exchange(Buffers(), when, how, Replace(), parts=WHOLE, label="buffers"))


def _summing(**argument: object) -> Algorithm:
    """An algorithm that keeps weights of ranks equal by sums of gradients, alike in each step, with any optimizer."""
    ((name, given),) = argument.items()
    expected = (
        "an algorithm that sums gradients in each step, without a warm-up or an optimizer of its own, as "
        "gradient_allreduce"
    )
    expected += ", or None" * (name == "inner")
    check_kind((Algorithm, DistributedAlgorithm, str), expected, **argument)
    assert isinstance(given, Algorithm | DistributedAlgorithm | str)
    algorithm = as_algorithm(given)
    alike = len(algorithm.phases) == 1 and algorithm.optimizer_class is None
    for exchange in algorithm.every_exchange():
        of_gradients = exchange.what is not None and exchange.what.reads == {"gradients"}
        each_step = alike and exchange.when == Every() and exchange.lag == 0
        if not (isinstance(exchange.how, Sum) and exchange.how.over == "ranks" and of_gradients and each_step):
            raise ConfigurationError(
                "weights must be equal after each of these steps", argument=name, expected=expected, seen=repr(given)
            )
    return algorithm


def _labelled(exchange: Exchange, label: str, **how: Any) -> Exchange:
    """The same exchange with another way to sum, and a label in front of its own."""
    assert isinstance(exchange.how, Sum)
    changed = dataclasses.replace(exchange.how, **how)
    return dataclasses.replace(exchange, how=changed).labelled(label)
