"""What an exchange is: what is sent, when, how, and what becomes of the result. The engine executes these values.

Then how a model is cut into parts that are exchanged separately, and which exchanges go together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from bagua.algorithms.exchanges.fields import (
    LEAST_CONTRACTION,
    OF_BUCKETS,
    OF_GRADIENTS,
    POINTS,
    How,
    Point,
    Then,
    What,
)
from bagua.checks import check_choice, check_kind, check_whole
from bagua.errors import ConfigurationError
from bagua.membership import Pace
from bagua.primitives import State

__all__ = ["Every", "Exchange", "Parts"]

By = Literal["arrival", "strided", "bytes"]


@dataclass(frozen=True)
class Every:
    """In every ``steps``-th step: those whose number in the phase, from 1, is ``offset`` more than a multiple of it.

    Args:
        steps: from one start to the next.
        offset: shift of the steps; negative ones start that much earlier.
        pace: pace of a member whose steps each stand for some of the fastest one, which are counted then; None where
            all make the same steps.

    Example:
        >>> [t for t in range(1, 10) if Every(3).due(t)], [t for t in range(1, 10) if Every(3, offset=1).due(t)]
        ([3, 6, 9], [1, 4, 7])
    """

    steps: int = 1
    offset: int = 0
    pace: Pace | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_whole(1, steps=self.steps)
        check_kind(int, "a whole number", offset=self.offset)

    def due(self, t: int, shift: int = 0, stride: int = 1) -> bool:
        """Whether it starts in step ``t`` of the phase, from 1; ``shift`` steps later for some parts.

        Args:
            t: number of the step; of several that are made as one, of the last one.
            shift: steps by which a part is later.
            stride: how many steps are made as one.
        """
        return (t - self.offset - shift) % self.steps < stride

    def round(self, t: int, shift: int = 0) -> int:
        """How many times it has started in the phase up to step ``t``."""
        begin = -self.offset - shift
        return (t + begin) // self.steps - begin // self.steps


@dataclass(frozen=True)
class Parts:
    """Parts of a model, each of which starts so many steps after the one before that all take one period together.

    Part ``p`` of ``n`` is due ``(p + 1) * steps // n`` steps after a multiple of the period ``steps``.

    Args:
        n: number of parts. Buckets, by arrival, all start in the same step.
        by: ``arrival``: buckets, in the order in which gradients appear; they follow ``bucket_bytes`` and autotuning.
            ``strided``: part ``p`` has the layers ``p``, ``p + n``, ... ``bytes``: each has about as many bytes.
            Neither changes during training.
        same_order: gradients must appear in the same order on all ranks. Otherwise rank 0's order of buckets is
            everyone's, and a rank may be late for some.

    Raises:
        ConfigurationError: there is no such way, or values that contradict each other.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        >>> Parts(2, "strided").cut(dict(model.named_parameters()))
        [['0.weight', '0.bias'], ['1.weight', '1.bias']]
    """

    n: int = 1
    by: By = "arrival"
    same_order: bool = False

    def __post_init__(self) -> None:
        check_whole(1, n=self.n)
        check_choice(get_args(By), by=self.by)
        check_kind(bool, "True or False", same_order=self.same_order)
        if self.by == "arrival" and self.n > 1:
            raise ConfigurationError(
                "buckets by arrival are cut by their size, and hold all parameters",
                argument="by",
                expected='"strided" or "bytes"',
                seen=repr(self.by),
            )

    def shift(self, part: int, steps: int) -> int:
        """How many steps after a multiple of the period ``part`` is due."""
        return (part + 1) * steps // self.n % steps

    def cut(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
        """Names of the parameters of each part; a part is empty where layers were frozen.

        Args:
            parameters: parameters of the model that are trained, by name, in its order.
        """
        return self._strided(parameters) if self.by == "strided" else self._balanced(parameters)

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse parts that are empty from the beginning, unless all are: then the model is frozen.

        Args:
            parameters: as for ``cut``.

        Raises:
            ConfigurationError: there are fewer layers, or parameters, than parts.
        """
        if parameters and not all(self.cut(parameters)):
            raise ConfigurationError(
                f"this model has too few layers for {self.n} fragments: one would hold no parameter",
                argument="fragments",
                expected="at most as many as there are layers",
                seen=f"{self.n} for {len(parameters)} parameters",
                advice=f"In an exchange of your own they are parts={self!r}.",
            )

    def _strided(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
        layers: dict[str, list[str]] = {}
        for name in parameters:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        dealt = list(layers.values())
        return [[name for layer in dealt[part :: self.n] for name in layer] for part in range(self.n)]

    def _balanced(self, parameters: Mapping[str, torch.Tensor]) -> list[list[str]]:
        """The largest first, each into the lightest part."""
        parts: list[list[str]] = [[] for _ in range(self.n)]
        loads = [0] * self.n
        order = {name: number for number, name in enumerate(parameters)}
        for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, order[name])):
            lightest = loads.index(min(loads))
            parts[lightest].append(name)
            loads[lightest] += parameters[name].nbytes
        return [sorted(part, key=order.__getitem__) for part in parts]


#: The buckets of the engine.
ALL_BY_ARRIVAL = Parts()


#: What nothing may be missing of; of a change of it some may.
_IN_FULL = {"weights", "buffers"}

#: All parameters at once: their results are taken in together, or not at all.
WHOLE = Parts(1, "strided")

#: Where what starts at a point is folded, unless it says otherwise; others at the point itself.
_FOLDED: dict[Point, Point] = {
    "backward begins": "backward ends",
    "bucket ready": "backward ends",
    "bucket stepped": "bucket ready",
}


@dataclass(frozen=True)
class Exchange:
    """What is sent, when, how, and what becomes of it.

    Args:
        what: is sent; None for a local action that needs nothing.
        when: it starts.
        how: ranks communicate; None for a local action: nothing is sent, ``then.fold`` is called.
        then: takes in the result.
        at: point of a step where it starts; None for where ``what`` is there first.
        until: point where it is folded, ``lag`` steps later; None for ``backward ends`` after points of a backward
            pass, for ``bucket ready`` after ``bucket stepped``, and for ``at`` otherwise.
        lag: steps between start and fold.
        parts: parts of the model that go separately. Buffers, which do not arrive, go all at once by default.
        label: name for its state, its connections and its metrics; unique among the exchanges of an algorithm.

    Raises:
        ConfigurationError: values that contradict each other.

    Example:
        >>> from bagua.algorithms import Every, Exchange, Mean, Replace, Weights
        >>> Exchange(Weights(), Every(8), Mean(), Replace()).at
        'stepped'

    Points of a step, in this order: ``safe``: a training forward begins; a local action there waits until nothing is
    under way. ``backward begins``: the first gradient is there. ``bucket ready``: all gradients of a bucket are.
    ``bucket stepped``: right after local actions at ``bucket ready``. ``backward ends``. ``stepped``: the optimizers
    have stepped.
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
        if "buffers" in self.needs and self.parts.by == "arrival":
            object.__setattr__(self, "parts", WHOLE)
        after = self.how is not None and "gradients" not in self.needs
        at: Point = self.at or ("stepped" if after else "bucket ready")
        check_choice(POINTS, at=at)
        until: Point = self.until or (at if self.how is None else _FOLDED.get(at, at))
        check_choice(POINTS, until=until)
        object.__setattr__(self, "at", at)
        object.__setattr__(self, "until", until)
        self.then.check(self)
        if self.lag == 0 and POINTS.index(until) < POINTS.index(at):
            raise ConfigurationError(
                f"{until!r} comes before {at!r} in each step",
                argument="lag",
                expected="at least 1, or points in the order of a step",
                seen=0,
            )
        of_buckets = at in OF_BUCKETS or until in OF_BUCKETS
        if of_buckets and (self.parts.by != "arrival"):
            raise ConfigurationError(
                "only parts by arrival are there bucket by bucket",
                argument="parts",
                expected=f"Parts(), or other points than {' and '.join(map(repr, OF_BUCKETS))}",
                seen=repr(self.parts),
            )
        if self.how is not None and self.what is None:
            raise ConfigurationError("nothing would be sent", argument="what", expected="as Weights()", seen=None)
        for point, touches in ((at, "gradients" in self.needs), (until, "gradients" in self.writes)):
            if touches and point not in OF_GRADIENTS:
                raise ConfigurationError(
                    f"the gradients of a step are not there, or of no use any more, at {point!r}",
                    argument="at" if point == at else "until",
                    expected=" or ".join(map(repr, OF_GRADIENTS)),
                    seen=repr(point),
                )
        _check_states(self)
        _check_contraction(self)
        _check_lag(self)

    @property
    def at_once(self) -> bool:
        """Whether it goes from start to fold without anything in between."""
        return self.how is None or (self.lag == 0 and self.at == self.until)

    @property
    def alone(self) -> bool:
        """Whether it does something on a group of one rank: locally, by its ``how``, or to what ``then`` remembers."""
        return self.how is None or self.how.alone or bool(self.then.state())

    @property
    def needs(self) -> frozenset[str]:
        """What it reads."""
        return frozenset() if self.what is None else self.what.reads

    @property
    def writes(self) -> frozenset[str]:
        """What it changes: what it sends; a local action the weights, too."""
        return self.needs if self.how is not None else self.needs | {"weights"}

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
        """The same exchange with ``label`` in front of its own."""
        return dataclasses.replace(self, label=".".join(filter(None, (label, self.label))))


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


def _check_contraction(exchange: Exchange) -> None:
    what, how = exchange.what, exchange.how
    kept = 1.0 if how is None else how.contraction
    if kept is not None and kept < LEAST_CONTRACTION and exchange.needs <= _IN_FULL:
        raise ConfigurationError(
            f"{how!r} may keep only {kept:.2%} of the square of a block, and weights would become what is left",
            argument="how",
            expected=f"one that keeps at least {LEAST_CONTRACTION:.0%}, as Mean(ScatterGatherReducer(MinMaxUInt8()))",
            seen=repr(what),
            advice="Send Difference() and take an OuterStep: that keeps weights whole.",
        )


def _check_lag(exchange: Exchange) -> None:
    """Feedback with a delay beyond the period does not converge, and residuals of overlapping flights are lost.

    Both were measured.
    """
    if exchange.how is None or exchange.what is None:
        return
    limit, why = None, ""
    folds_first = POINTS.index(exchange.until) <= POINTS.index(exchange.at)
    if "gradients" in exchange.writes & exchange.needs and folds_first:
        limit, why = 0, "late gradients would take the place of those that are to be sent"
    elif (exchange.writes & exchange.needs) - {"gradients"} or exchange.states():
        limit = exchange.when.steps - (0 if folds_first else 1)
        why = "a flight has to come back before the next one of the same part starts"
    loses = exchange.then.replaces and "weights" in exchange.writes and _spans_an_update(exchange)
    if loses and exchange.lag >= exchange.when.steps:
        limit = exchange.when.steps - 1
        why = (
            "weights that take the place of those of a later step, from which the next flight starts, undo every update"
        )
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
    after = exchange.until in ("safe", "backward begins", "bucket ready")
    return exchange.lag > (1 if after and exchange.at in ("stepped", "bucket stepped") else 0)


#: A moment: steps after the start of a flight, and a place in the order of a step.
Moment = tuple[int, int]


def check_exchanges(exchanges: Sequence[Exchange]) -> None:
    """Refuse exchanges that contradict each other.

    Raises:
        ConfigurationError: naming both.
    """
    for one, other in itertools.combinations(exchanges, 2):
        if one.label == other.label and one.how is not None and other.how is not None:
            raise _contradiction("they have the same label", one, other, "labels that tell them apart")
        if one.label == other.label and _declare_differently(one, other):
            raise _contradiction("they remember different things under one name", one, other, "equal declarations")
        both_replace = "gradients" in one.writes & other.writes and one.then.replaces and other.then.replaces
        if both_replace and _meet(one, other):
            raise _contradiction("both replace gradients in one step", one, other, "steps in which one of them is due")
    for one, other in itertools.permutations(exchanges, 2):
        # An outer step goes on from its anchor, whatever became of the weights meanwhile.
        sends_whole = one.how is not None and "anchor" not in one.needs
        if sends_whole and one.then.replaces and one.writes & other.writes and _is_undone(one, other):
            raise _contradiction(
                "the first one replaces what the second one writes while it is on its way", one, other, "Add()"
            )


def check_phases(phases: Sequence[Sequence[Exchange]]) -> None:
    """Refuse exchanges of other phases that would not find what was remembered under their label.

    Raises:
        ConfigurationError: naming both.
    """
    for one, other in itertools.combinations(itertools.chain.from_iterable(phases), 2):
        common = {state.name for state in one.states()} & {state.name for state in other.states()}
        if one.label == other.label and common and one.parts != other.parts:
            names = ", ".join(sorted(common))
            raise _contradiction(
                f"{names} would begin anew where the parts change from phase to phase",
                one,
                other,
                "the same parts in all phases, or another label in each",
            )


def _declare_differently(one: Exchange, other: Exchange) -> bool:
    """Whether a name stands for another state in each."""
    declared = {state.name: state for state in one.states()}
    return any(declared.get(state.name, state) != state for state in other.states())


def _contradiction(problem: str, one: Exchange, other: Exchange, expected: str) -> ConfigurationError:
    return ConfigurationError(
        f"two exchanges contradict each other: {problem}",
        argument="exchanges",
        expected=expected,
        seen=f"{one!r} and {other!r}",
    )


def _starts(exchange: Exchange) -> Iterator[int]:
    """What the numbers of the steps in which it starts are, up to multiples of its period."""
    for part in range(exchange.parts.n):
        yield exchange.when.offset + exchange.parts.shift(part, exchange.when.steps)


def _meet(one: Exchange, other: Exchange) -> bool:
    """Whether both are folded in some step."""
    common = math.gcd(one.when.steps, other.when.steps)
    return any(
        (here + one.lag - there - other.lag) % common == 0
        for here, there in itertools.product(_starts(one), _starts(other))
    )


def _is_undone(flight: Exchange, other: Exchange) -> bool:
    """Whether ``other`` writes between start and fold of some flight."""
    if flight.at_once:
        return False
    start: Moment = (0, 3 * POINTS.index(flight.at) + 2)
    end: Moment = (flight.lag, 3 * POINTS.index(flight.until))
    place = 3 * POINTS.index(other.until) + (1 if other.at_once else 0)
    common = math.gcd(flight.when.steps, other.when.steps)
    return any(
        start < (later, place) < end and (there + other.lag - here - later) % common == 0
        for later in range(flight.lag + 1)
        for here, there in itertools.product(_starts(flight), _starts(other))
    )


def differ_between_ranks(exchanges: Sequence[Exchange]) -> bool:
    """Whether ranks hold different weights after some steps, by what the exchanges say.

    They do not if gradients are exchanged in every step with the same result for all, and so is all else.
    """
    sent = [one for one in exchanges if one.how is not None]
    uniform = all(one.how.uniform and one.how.lockstep for one in sent if one.how is not None)
    gradients = [one for one in sent if one.when.steps == 1 and "gradients" in one.writes]
    return not (uniform and any(one.then.replaces for one in gradients))
