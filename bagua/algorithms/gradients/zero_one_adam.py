"""Adam that exchanges one bit for each element of a gradient, and then one bit of what was learned in several steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from bagua.algorithms.base import bound_form
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every, Then, What
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.outer import check_has_anchor, restart_unless_finite
from bagua.algorithms.exchanges.values import WHOLE, Difference, Gradients, Mean
from bagua.algorithms.gradients.q_adam import FrozenAdam, owner_in
from bagua.buckets import Bucket
from bagua.checks import check_whole, unusable
from bagua.comm import Communicator
from bagua.compression import Sign
from bagua.optim import QAdamOptimizer, ZeroOneAdamOptimizer
from bagua.primitives import ErrorFeedback, ReducerMemory, ScatterGatherReducer, State, SumReducer


@dataclass(frozen=True)
class ZeroOneAdamAlgorithm(FrozenAdam):
    """Adam with a second moment that few steps change, signs of gradients in the others, and then steps alone.

    Before ``warmup_steps`` of the optimizer are over, some steps exchange exact gradients, which change both moments:
    all of the first ``variance_steps``, every second one until there were as many, every fourth one, and so on. Other
    steps exchange gradients as signs, with one magnitude for each block and error feedback, which change the first
    moment only.

    After that the second moment is frozen, and ranks step alone. With ``s`` the sum of the learning rates since the
    last exchange, ``D_i`` what rank ``i`` has learned since then (the common weights minus its own), and ``d`` the
    denominator of Adam: ``M = S(mean_i S(D_i d + e_i))``; ``m <- M / s``; the common weights move by ``- M / d``. The
    period is one step at first, and doubles after each ``period_steps`` steps, up to ``longest_period``.

    Weight decay is part of the gradients here, so it is part of what signs stand for.

    Args:
        q_adam_optimizer: the optimizer of the model, a ``ZeroOneAdamOptimizer``; None finds it. See ``QAdamAlgorithm``.
        hierarchical: sum inside each host in full precision, and compress between hosts only.
        block_numel: elements that share a magnitude, a multiple of 8.
        variance_steps: exact steps after which the distance from one to the next doubles.
        period_steps: steps after which the distance from one exchange to the next doubles.
        longest_period: longest distance between exchanges; a power of two.

    Raises:
        InvalidTypeError: an option of a wrong type.
        ConfigurationError: an option out of its range; when a model is wrapped: a parameter that no
            ``ZeroOneAdamOptimizer`` owns, or several with different warm-ups.

    Example:
        >>> ZeroOneAdamAlgorithm(longest_period=4).exchanges("alone")[0].when
        Doubling(steps=1, offset=0, period_steps=1000, longest=4)

    Paper: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023. There
    ``variance_steps=16`` and ``period_steps=32678``, and not gradients are compressed, but the momenta that they lead
    to.
    """

    block_numel: int = 64
    variance_steps: int = 64
    period_steps: int = 1000
    longest_period: int = 16

    optimizer_class: ClassVar[Callable[..., torch.optim.Optimizer] | None] = ZeroOneAdamOptimizer
    owner_class: ClassVar[type[QAdamOptimizer]] = ZeroOneAdamOptimizer

    def __post_init__(self) -> None:
        check_whole(1, variance_steps=self.variance_steps)
        _ = Doubling(period_steps=self.period_steps, longest=self.longest_period)
        super().__post_init__()

    @property
    def reducer(self) -> SumReducer:
        """Scatter and gather of signs with error feedback."""
        return ErrorFeedback(ScatterGatherReducer(Sign(self.block_numel)))

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Gradients in each step, and steps alone."""
        return ("together", "alone")

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step, and the warm-up of the optimizer."""
        return "together" if super().phase(step, model) == "warm-up" else "alone"

    def exchanges(self, phase: Hashable = "alone") -> tuple[Exchange, ...]:
        """Gradients, exactly or in signs; or what was learned, every so often."""
        if phase == "together":
            exact = Thinning(count=self.variance_steps)
            how = Mean(ExactAtTimes(self.reducer, exact), self.hierarchical)
            return (Exchange(Gradients(), Every(), how, NoteExact(exact), label="gradients"),)
        when = Doubling(period_steps=self.period_steps, longest=self.longest_period)
        how = Mean(self.reducer, self.hierarchical)
        return (Exchange(LearnedMomenta(), when, how, MomentaToWeights(), parts=WHOLE, label="momenta"),)


@dataclass(frozen=True)
class Thinning(Every):
    """In each step, then in every second one, every fourth one, and so on; ``count`` times each.

    Args:
        steps: 1.
        offset: 0.
        count: starts after which the distance doubles.

    Example:
        >>> [t for t in range(1, 21) if Thinning(count=2).due(t)]
        [1, 2, 4, 6, 8, 12, 16]
    """

    count: int = 16

    def due(self, t: int, shift: int = 0) -> bool:
        """Whether step ``t``, from 1, is one of them."""
        distance, end = 1, 0
        while True:
            end = (end // distance + self.count) * distance
            if t <= end:
                return t % distance == 0
            distance *= 2


@dataclass(frozen=True)
class Doubling(Every):
    """After every step, and after each ``period_steps`` steps half as often, down to one in ``longest``.

    Args:
        steps: 1.
        offset: 0.
        period_steps: steps after which the distance from one start to the next doubles.
        longest: distance, a power of two.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> [t for t in range(1, 17) if Doubling(period_steps=4, longest=4).due(t)]
        [1, 2, 3, 4, 6, 8, 12, 16]
    """

    period_steps: int = 1000
    longest: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(1, period_steps=self.period_steps, longest_period=self.longest)
        if self.longest & (self.longest - 1):
            raise unusable("longest_period", "a power of two", self.longest)

    def due(self, t: int, shift: int = 0) -> bool:
        """Whether it starts in step ``t`` of the phase, from 1."""
        return t % self._distance((t - 1) // self.period_steps) == 0

    def _distance(self, stage: int) -> int:
        return 1 << min(stage, self.longest.bit_length() - 1)

    def round(self, t: int, shift: int = 0) -> int:
        """How many times it has started in the phase up to step ``t``."""
        growing = min((t - 1) // self.period_steps, self.longest.bit_length() - 1)
        ends = [(stage + 1) * self.period_steps for stage in range(growing)] + [t]
        begins = [0, *ends[:-1]]
        return sum(
            end // self._distance(stage) - begin // self._distance(stage)
            for stage, (begin, end) in enumerate(zip(begins, ends, strict=True))
        )


@dataclass(frozen=True)
class ExactAtTimes(SumReducer):
    """The exact sum in some steps of training, and what a reducer makes of it in the others.

    Args:
        reducer: reducer of the other steps.
        when: the exact ones.
    """

    reducer: SumReducer
    when: Every

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the reducer refuses."""
        self.reducer.check_dtype(dtype)

    def state(self) -> tuple[State, ...]:
        """That of the reducer; exact steps leave it as it is."""
        return self.reducer.state()

    def reduce(
        self,
        flat: torch.Tensor,
        communicator: Communicator,
        memory: ReducerMemory,
        remainder: torch.Tensor | None = None,
    ) -> None:
        """See ``SumReducer.reduce``."""
        if not self.when.due(memory.step + 1):
            self.reducer.reduce(flat, communicator, memory, remainder)
            return
        communicator.allreduce(flat)
        if remainder is not None:
            remainder.zero_()


@dataclass(frozen=True)
class NoteExact(Then):
    """The result takes the place of the gradients, and the optimizer is told whether it is exact.

    Args:
        when: it is.
    """

    when: Every

    replaces: ClassVar[bool] = True

    def fold(self, flight: Flight) -> None:
        """Tell it; the result lies where the gradients do."""
        exact = self.when.due(flight.step + 1)
        for parameter in flight.bucket.parameters:
            owner_in(flight, parameter, ZeroOneAdamOptimizer)[0].note(parameter, exact=exact)


@dataclass(frozen=True)
class LearnedMomenta(What):
    """What was learned since the last exchange, times the denominator of Adam: momenta times learning rates, added."""

    difference: Difference = field(default_factory=Difference)

    reads: ClassVar[frozenset[str]] = Difference.reads

    def state(self) -> tuple[State, ...]:
        """The anchor."""
        return self.difference.state()

    def fill(self, flight: Flight) -> None:
        """Subtract, and multiply."""
        self.difference.fill(flight)
        torch._foreach_mul_(flight.views(flight.flat), _denominators(flight))


@dataclass(frozen=True)
class MomentaToWeights(Then):
    """The anchor makes the steps of the mean momenta; weights become the anchor, and momenta the mean ones.

    A result that is not finite is dropped. A rank whose own weights are not finite restarts from the anchor.
    """

    whole: ClassVar[bool] = True

    def check(self, what: What | None) -> None:
        """Refuse what has no anchor."""
        check_has_anchor(what)

    def enter(self, buckets: Sequence[Bucket], model: Model) -> None:
        """The second moments change no more, whichever updates a ``GradScaler`` has skipped."""
        for bucket in buckets:
            for parameter in bucket.parameters:
                owner = model.owner_of(parameter)
                assert owner is not None
                assert isinstance(owner[0], ZeroOneAdamOptimizer)
                owner[0].freeze(parameter)

    @torch.no_grad()
    def fold(self, flight: Flight) -> None:
        """Step the anchor, and let weights and momenta follow."""
        anchor = flight.state["anchor"]
        if restart_unless_finite(flight, anchor):
            return
        totals = flight.views(flight.flat)
        for parameter, total in zip(flight.bucket.parameters, totals, strict=True):
            owner_in(flight, parameter, ZeroOneAdamOptimizer)[0].resume_from(parameter, total)
        torch._foreach_div_(totals, _denominators(flight))
        anchor.sub_(flight.flat)
        flight.bucket.write_weights(anchor)


def _denominators(flight: Flight) -> list[torch.Tensor]:
    owners = [(one, *owner_in(flight, one, ZeroOneAdamOptimizer)) for one in flight.bucket.parameters]
    return [owner.denominator(parameter, group) for parameter, owner, group in owners]


ZeroOneAdamAlgorithmImpl = bound_form(ZeroOneAdamAlgorithm)
