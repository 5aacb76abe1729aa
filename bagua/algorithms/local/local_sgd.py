"""Training alone, with the mean of all weights every so often, or a slow momentum over these means."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.exchange import WHOLE, Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, Then
from bagua.algorithms.exchanges.outer import check_has_anchor, restart_unless_finite
from bagua.algorithms.exchanges.values import Difference, Replace, Weights
from bagua.algorithms.local.diloco import DiLoCoAlgorithm
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.checks import check_numbers
from bagua.compression import Codec, as_codec
from bagua.errors import ConfigurationError
from bagua.primitives import State


@dataclass(frozen=True)
class LocalSGDAlgorithm(LocalUpdates):
    """Take the mean of the weights after every ``sync_every``-th step: ``x_i <- (1 / n) sum_j x_j``.

    Between these steps nothing is sent. What optimizers remember stays on its rank. With ``start_after`` it is
    post-local SGD; after that, steps are counted anew. With ``codec`` or ``overlap``, ranks send what they learned
    since the last mean, and remember that mean: a copy of the weights.

    Args:
        sync_every: steps from one mean to the next.
        codec: codec that what was learned is sent in, as ``Float16()``, or its name, as ``"int4"``; None for all bits.
        overlap: steps from the start of an exchange to its end; less than ``sync_every``. Training goes on meanwhile,
            and nothing that is learned meanwhile is lost.
        start_after: so many steps at the beginning exchange gradients instead.
        start_with: an algorithm that sums gradients in each of these steps, as ``power_sgd`` on slow links.
        average_buffers: take the mean of floating-point buffers, too, after each ``sync_every``-th step.
        hierarchical: sum inside each host first.
        inner: exchange of the ranks of one host in each step, as ``gradient_allreduce``; see ``LocalUpdates``.
        pace: ``equal``, or between islands ``own``: each makes the steps that it can; see ``LocalUpdates``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.

    Example:
        >>> LocalSGDAlgorithm(sync_every=16).outer_exchange.when
        Every(steps=16, offset=0)

    Papers: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019. Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD", ICLR 2020.
    """

    _: KW_ONLY
    codec: Codec | str | None = None
    overlap: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", as_codec(self.codec))
        super().__post_init__()

    @property
    def outer_exchange(self) -> Exchange:
        """The mean of the weights takes their place; or that of differences is a whole step of the last mean."""
        if self.codec is None and self.overlap == 0:
            return Exchange(Weights(), Every(self.sync_every), self.mean(), Replace(), parts=WHOLE)
        return DiLoCoAlgorithm(
            self.sync_every,
            outer="sgd",
            outer_lr=1.0,
            outer_momentum=0.0,
            overlap=self.overlap,
            mix="add" if self.overlap else "blend",
            codec=self.codec,
            hierarchical=self.hierarchical,
            inner=self.inner,
        ).outer_exchange


@dataclass(frozen=True)
class SlowStep(Then):
    """A step of the anchor with slow momentum: ``u <- beta u + D / lr``, ``Theta <- Theta - alpha lr u``.

    ``D`` is the mean difference and ``lr`` the learning rate of each parameter's optimizer in the last step before. The
    weights become the anchor ``Theta``.

    Args:
        beta: part of the momentum that stays, from 0 and less than 1.
        alpha: factor on the step, above 0.

    Raises:
        ConfigurationError: an option out of its range; in training, a learning rate of 0 where weights have changed.
    """

    beta: float = 0.6
    alpha: float = 1.0

    replaces: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_numbers(lambda beta: 0 <= beta < 1, "a number from 0 and less than 1", beta=self.beta)
        check_numbers(lambda alpha: alpha > 0, "a number above 0", alpha=self.alpha)

    def check(self, exchange: Exchange) -> None:
        """Refuse what has no anchor."""
        check_has_anchor(exchange)

    def state(self) -> tuple[State, ...]:
        """The momentum."""
        return (State("slow_momentum", scope="shared"),)

    @torch.no_grad()
    def fold(self, flight: Flight) -> None:
        """Step, and let the weights follow."""
        anchor, momentum = flight.state["anchor"], flight.state["slow_momentum"]
        if restart_unless_finite(flight, anchor):
            return
        rates, differences = flight.learning_rates(), flight.views(flight.flat)
        if any(rate == 0.0 and one.any() for rate, one in zip(rates, differences, strict=True)):
            raise ConfigurationError(  # Before anything changes.
                f"{self!r} divides by the learning rate, which is 0",
                argument="lr",
                expected="a rate above 0 for each parameter that learns, in each step after which ranks exchange",
                seen=0.0,
                advice="End the schedule above 0, or wrap the model with the optimizer of all its parameters.",
            )
        views = zip(flight.views(anchor), flight.views(momentum), differences, rates, strict=True)
        for place, slow, difference, rate in views:
            if rate != 0.0:
                slow.mul_(self.beta).add_(difference, alpha=1.0 / rate)
                place.sub_(slow, alpha=self.alpha * rate)
        flight.bucket.write_weights(anchor)


@dataclass(frozen=True)
class SlowMoAlgorithm(LocalUpdates):
    """Step with slow momentum after every ``sync_every``-th step; see ``SlowStep`` for the update rule.

    Between these steps nothing is sent. What optimizers remember stays on its rank.

    Args:
        sync_every: steps from one exchange to the next.
        beta: slow momentum, from 0 and less than 1; 0 is local SGD.
        alpha: slow learning rate, above 0.
        start_after: so many steps at the beginning exchange gradients instead.
        start_with: an algorithm that sums gradients in each of these steps, as ``power_sgd`` on slow links.
        average_buffers: take the mean of floating-point buffers, too, after each ``sync_every``-th step.
        hierarchical: sum inside each host first.
        inner: exchange of the ranks of one host in each step, as ``gradient_allreduce``; see ``LocalUpdates``.
        pace: ``equal``, or between islands ``own``: each makes the steps that it can; see ``LocalUpdates``.

    Raises:
        ConfigurationError: an option of a wrong type or out of its range.

    Example:
        >>> SlowMoAlgorithm(12, beta=0.5).outer_exchange.then
        SlowStep(beta=0.5, alpha=1.0)

    Paper: Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR 2020.
    """

    sync_every: int = 12
    _: KW_ONLY
    beta: float = 0.6
    alpha: float = 1.0

    @property
    def outer_exchange(self) -> Exchange:
        """The mean difference, and a step of the anchor."""
        return Exchange(Difference(), Every(self.sync_every), self.mean(), SlowStep(self.beta, self.alpha), parts=WHOLE)


LocalSGDAlgorithmImpl = bound_form(LocalSGDAlgorithm)
SlowMoAlgorithmImpl = bound_form(SlowMoAlgorithm)
