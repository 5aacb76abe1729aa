"""What an exchange is: what is sent, when, how, and what becomes of the result. The engine executes these values."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch

from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.parts import ALL_BY_ARRIVAL, Parts
from bagua.buckets import Bucket
from bagua.checks import check_choice, check_kind, check_whole
from bagua.comm import ProcessGroup, Work
from bagua.errors import ConfigurationError
from bagua.primitives import State

__all__ = ["POINTS", "Every", "Exchange", "Flight", "How", "Point", "Then", "What"]

#: The moments of a step, in their order.
Point = Literal["safe", "backward begins", "bucket ready", "bucket stepped", "backward ends", "stepped"]
POINTS: tuple[Point, ...] = get_args(Point)
#: Points that each bucket reaches by itself.
OF_BUCKETS: tuple[Point, ...] = ("bucket ready", "bucket stepped")
#: Points at which gradients are sent, and replaced.
_OF_GRADIENTS: tuple[Point, ...] = (*OF_BUCKETS, "backward ends")

#: Where what starts at a point is folded, unless it says otherwise; others at the point itself.
_FOLDED: dict[Point, Point] = {
    "backward begins": "backward ends",
    "bucket ready": "backward ends",
    "bucket stepped": "bucket ready",
}


class What(ABC):
    """What is sent. Subclasses are frozen dataclasses.

    Attributes:
        reads: ``weights``, ``gradients``, or names of other things.
        in_place: it is made of ``bucket.gradients``, which have been multiplied by ``flight.scale`` when they were
            gathered. With no lag it is sent from there, and the result stays there.
        exchangeable_weights: weights are sent from where they lie, so that is memory which the transport can read
            without a copy.
        max_lag: the largest lag that makes sense; None for any.
        at: where an exchange of it starts, unless it says otherwise.
    """

    reads: ClassVar[frozenset[str]]
    in_place: ClassVar[bool] = False
    exchangeable_weights: ClassVar[bool] = False
    max_lag: ClassVar[int | None] = None
    at: ClassVar[Point] = "stepped"

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    @abstractmethod
    def fill(self, flight: Flight) -> None:
        """Write ``flight.flat``. In the thread, and on the stream, that compute."""


class How(ABC):
    """How ranks communicate. Subclasses are frozen dataclasses.

    Attributes:
        lockstep: all ranks take part in each round, at the same step, and wait for its result when it is due. Otherwise
            exchanges go on in the background, results are taken in when they are there, and the bound form of the
            algorithm has a ``Plane``.
        chunked: buckets are padded so that they split evenly over the ranks.
    """

    lockstep: ClassVar[bool] = True
    chunked: ClassVar[bool] = False

    @property
    def alone(self) -> bool:
        """Whether it does something on a group of one rank, too, as one with a momentum of its own does."""
        return False

    @property
    def uniform(self) -> bool:
        """Whether all ranks end with the same result."""
        return True

    @property
    def exact(self) -> bool:
        """Whether the result is that of exact arithmetic, up to rounding."""
        return True

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    def check(self, group: ProcessGroup) -> None:
        """Refuse a group that it cannot work on. Not collective.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse parameters of a dtype that cannot be sent.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def prepare(self, group: ProcessGroup) -> Any:
        """What ``run`` needs on ``group``, the private one: ``flight.prepared``. May be collective."""
        return None

    def blocking(self, group: ProcessGroup, prepared: Any) -> bool:
        """Whether ``run`` waits for a call that it starts, instead of returning its ``Work``."""
        return True

    def ranks(self, group: ProcessGroup) -> float:
        """How many contributions like that of this rank make one mean: the size of ``group``, if all take part."""
        return group.size

    def scale(self, ranks: float) -> float:
        """Factor on what is sent, for so many ``ranks``; costs nothing where it is copied anyway."""
        return 1.0

    @abstractmethod
    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        """Replace ``flight.flat`` by the result.

        Runs wherever the transport likes it best: in the thread that computes, in a background thread, or on a
        communication stream. So it touches the flight and the communicators of ``group`` only.

        Returns:
            What the engine waits for before ``fold``; None when there is nothing to wait for.
        """


class Then(ABC):
    """What becomes of the result. Subclasses are frozen dataclasses.

    Attributes:
        keeps_sent: ``flight.sent`` is needed.
        alone: does something on a group of one rank, too.
        whole: needs to know whether the results of a whole part are finite.
        replaces: what was there before is lost.
        lag_is_period: a flight is folded right before the next one starts, and not at any other time.
        reads_rates: needs learning rates.
        cut: what happens to flights when training is interrupted: their results are folded early, or dropped.
    """

    keeps_sent: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    replaces: ClassVar[bool] = False
    lag_is_period: ClassVar[bool] = False
    reads_rates: ClassVar[bool] = False

    def check(self, what: What | None) -> None:
        """Refuse what it cannot take in.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def writes(self, what: What | None) -> frozenset[str]:
        """What it changes: ``weights``, ``gradients``, or names of other things."""
        return frozenset() if what is None else what.reads

    def cut(self, what: What | None) -> Literal["fold", "drop"]:
        """``fold`` for weights; ``drop`` for gradients of a step that is over: nobody will step with them."""
        return "drop" if "gradients" in self.writes(what) else "fold"

    def state(self) -> tuple[State, ...]:
        """What is remembered."""
        return ()

    def check_parameters(self, parameters: Sequence[torch.Tensor]) -> None:
        """Refuse parameters that it cannot work on, before training begins.

        Raises:
            ConfigurationError: it cannot.
        """
        return

    def enter(self, buckets: Sequence[Bucket], model: Model) -> None:
        """The buckets were formed, or the exchange has become part of the algorithm."""
        return

    def start(self, flight: Flight) -> None:
        """The flight is about to start, from ``flight.flat``."""
        return

    @abstractmethod
    def fold(self, flight: Flight) -> None:
        """Take in the result, ``flight.flat``. In the thread, and on the stream, that compute."""


@dataclass(frozen=True)
class Every:
    """In every ``steps``-th step: those whose number in the phase, from 1, is ``offset`` more than a multiple of it.

    Subclasses may have other intervals: they override ``due``, and ``steps`` is the shortest one. ``round`` then asks
    ``due`` for every step so far; where that takes too long, they override it as well.

    Args:
        steps: from one start to the next.
        offset: of the steps; negative ones start that much earlier.

    Example:
        >>> [t for t in range(1, 10) if Every(3).due(t)], [t for t in range(1, 10) if Every(3, offset=1).due(t)]
        ([3, 6, 9], [1, 4, 7])
    """

    steps: int = 1
    offset: int = 0

    def __post_init__(self) -> None:
        check_whole(1, steps=self.steps)
        check_kind(int, "a whole number", offset=self.offset)

    def due(self, t: int, shift: int = 0) -> bool:
        """Whether it starts in step ``t`` of the phase, from 1; ``shift`` steps later for some parts."""
        return (t - self.offset - shift) % self.steps == 0

    @property
    def regular(self) -> bool:
        """Whether it is due by ``steps`` and ``offset`` alone."""
        return type(self).due is Every.due

    def round(self, t: int, shift: int = 0) -> int:
        """How many times it has started in the phase up to step ``t``."""
        if not self.regular:
            return sum(self.due(step, shift) for step in range(1, t + 1))
        begin = -self.offset - shift
        return (t + begin) // self.steps - begin // self.steps


@dataclass(frozen=True)
class Exchange:
    """What is sent, when, how, and what becomes of it.

    Args:
        what: is sent; None for a local action that needs nothing.
        when: it starts.
        how: ranks communicate; None for a local action: nothing is sent, ``then.fold`` is called.
        then: takes in the result.
        at: where in a step it starts; None for where ``what`` is there first.
        until: where it is folded, ``lag`` steps later; None for ``backward ends`` after points of a backward pass, for
            ``bucket ready`` after ``bucket stepped``, and for ``at`` otherwise.
        lag: steps between start and fold.
        parts: of the model that go separately.
        label: of its state, its connections and its metrics; unique among the exchanges of an algorithm.

    Raises:
        ConfigurationError: values that contradict each other.

    Example:
        >>> from bagua.algorithms import Every, Exchange, Mean, Replace, Weights
        >>> Exchange(Weights(), Every(8), Mean(), Replace()).at
        'stepped'

    Points of a step, in this order: ``safe``: a training forward begins. ``backward begins``: the first gradient is
    there. ``bucket ready``: all gradients of a bucket are. ``bucket stepped``: right after local actions at
    ``bucket ready``. ``backward ends``. ``stepped``: the optimizers have stepped.
    """

    what: What | None
    when: Every
    how: How | None
    then: Then
    at: Point | None = None
    until: Point | None = None
    lag: int = 0
    parts: Parts = ALL_BY_ARRIVAL
    label: str = ""

    def __post_init__(self) -> None:
        for name, kind in (("when", Every), ("then", Then), ("parts", Parts)):
            check_kind(kind, f"{kind.__name__}(...)", **{name: getattr(self, name)})
        check_kind((What, type(None)), "what is sent, as Gradients() or Weights()", what=self.what)
        check_kind((How, type(None)), "how ranks communicate, as Mean(), or None", how=self.how)
        check_whole(0, lag=self.lag)
        check_kind(str, "a word", label=self.label)
        self.then.check(self.what)
        self._settle_points()
        _check_places(self)
        _check_gradients(self)
        _check_states(self)
        _check_lag(self)

    def _settle_points(self) -> None:
        at: Point = self.at or (self.what.at if self.what is not None and self.how is not None else "bucket ready")
        check_choice(POINTS, at=at)
        until: Point = self.until or (at if self.how is None else _FOLDED.get(at, at))
        check_choice(POINTS, until=until)
        object.__setattr__(self, "at", at)
        object.__setattr__(self, "until", until)

    @property
    def starts_at(self) -> Point:
        """``at``, which is never None once the value exists."""
        assert self.at is not None
        return self.at

    @property
    def folds_at(self) -> Point:
        """``until``, which is never None once the value exists."""
        assert self.until is not None
        return self.until

    @property
    def at_once(self) -> bool:
        """Whether it goes from start to fold without anything in between."""
        return self.how is None or (self.lag == 0 and self.at == self.until)

    @property
    def alone(self) -> bool:
        """Whether it does something on a group of one rank."""
        return self.then.alone or (self.how is not None and self.how.alone)

    @property
    def needs(self) -> frozenset[str]:
        """What it reads."""
        return frozenset() if self.what is None else self.what.reads

    @property
    def writes(self) -> frozenset[str]:
        """What it changes."""
        return self.then.writes(self.what)

    def states(self) -> tuple[State, ...]:
        """All that it remembers. What follows an anchor of one rank belongs to that rank as well."""
        return tuple({one.name: one for one in self.declared()}.values())

    def declared(self) -> list[State]:
        """As ``states``; what several of its values remember together comes several times."""
        sent = () if self.what is None else self.what.state()
        taken_in = self.then.state()
        if any(one.start == "weights" and one.scope == "local" for one in sent):
            taken_in = tuple(dataclasses.replace(one, scope="local") for one in taken_in)
        return [*sent, *(() if self.how is None else self.how.state()), *taken_in]

    def labelled(self, label: str) -> Exchange:
        """The same exchange with another label."""
        return dataclasses.replace(self, label=label)


def _check_places(exchange: Exchange) -> None:
    at, until = exchange.starts_at, exchange.folds_at
    if exchange.lag == 0 and POINTS.index(until) < POINTS.index(at):
        raise ConfigurationError(
            f"{until!r} comes before {at!r} in each step",
            argument="lag",
            expected="at least 1, or points in the order of a step",
            seen=0,
        )
    of_buckets = at in OF_BUCKETS or until in OF_BUCKETS
    if of_buckets and (exchange.parts.by != "arrival"):
        raise ConfigurationError(
            "only parts by arrival are there bucket by bucket",
            argument="parts",
            expected=f"Parts(), or other points than {' and '.join(map(repr, OF_BUCKETS))}",
            seen=repr(exchange.parts),
        )
    if exchange.how is not None and exchange.what is None:
        raise ConfigurationError("nothing would be sent", argument="what", expected="as Weights()", seen=None)


def _check_gradients(exchange: Exchange) -> None:
    """Gradients are there once a backward pass has brought them, and of use until the optimizers step."""
    at, until = exchange.starts_at, exchange.folds_at
    for point, touches in ((at, "gradients" in exchange.needs), (until, "gradients" in exchange.writes)):
        if touches and point not in _OF_GRADIENTS:
            raise ConfigurationError(
                f"the gradients of a step are not there, or of no use any more, at {point!r}",
                argument="at" if point == at else "until",
                expected=" or ".join(map(repr, _OF_GRADIENTS)),
                seen=repr(point),
            )


def _check_states(exchange: Exchange) -> None:
    declared: dict[str, State] = {}
    for one in exchange.declared():
        if declared.setdefault(one.name, one) != one:
            raise ConfigurationError(
                f"it remembers different things under the name {one.name!r}",
                argument="state",
                expected=repr(declared[one.name]),
                seen=repr(one),
            )
    shared = [one.name for one in declared.values() if one.scope == "shared"]
    if shared and exchange.how is not None and not exchange.how.uniform:
        raise ConfigurationError(
            f"ranks end with different results, so {', '.join(map(repr, shared))} would not be equal on all of them",
            argument="how",
            expected='one with the same result for all, as Mean(), or Difference(scope="local")',
            seen=repr(exchange.how),
        )


def _check_lag(exchange: Exchange) -> None:
    """Feedback with a delay beyond the period does not converge, and residuals of overlapping flights are lost."""
    if exchange.how is None or exchange.what is None:
        return
    if exchange.then.lag_is_period and exchange.lag != exchange.when.steps:
        raise ConfigurationError(
            f"{exchange.then!r} ends one flight where the next one starts",
            argument="lag",
            expected=f"the period, which is {exchange.when.steps}",
            seen=exchange.lag,
        )
    limit, why = None, ""
    folds_first = POINTS.index(exchange.folds_at) <= POINTS.index(exchange.starts_at)
    if exchange.what.max_lag is not None:
        limit, why = exchange.what.max_lag, f"{exchange.what!r} is needed in the same step"
    elif "gradients" in exchange.writes & exchange.needs and folds_first:
        limit, why = 0, "late gradients would take the place of those that are to be sent"
    elif (exchange.writes & exchange.needs) - {"gradients"} or exchange.states():
        limit = exchange.when.steps - (0 if folds_first else 1)
        why = "a flight has to come back before the next one of the same part starts"
    loses = exchange.then.replaces and "weights" in exchange.writes and _spans_an_update(exchange)
    if loses and exchange.when.steps == 1:
        limit, why = 0, "weights that replace those of a later step would undo every update"
    if limit is not None and exchange.lag > limit:
        raise ConfigurationError(
            f"{why}: {exchange!r}",
            argument="lag",
            expected=f"at most {limit}",
            seen=exchange.lag,
            advice="Use a longer period, Add() where results come late, or other points.",
        )


def _spans_an_update(exchange: Exchange) -> bool:
    """Whether the optimizers step between start and fold."""
    after = exchange.folds_at in ("safe", "backward begins", "bucket ready")
    return exchange.lag > (1 if after and exchange.starts_at in ("stepped", "bucket stepped") else 0)
