"""Which exchanges go together, and what follows from them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import POINTS
from bagua.errors import ConfigurationError

#: A moment: steps after the start of a flight, and a place in the order of a step.
Moment = tuple[int, int]

#: What can be expected of an algorithm. ``exact``: after every step all ranks hold what one process with all the data
#: would. ``bounded``: they are equal, and near that. ``consensus``: they differ, and come together without gradients.
Promise = Literal["exact", "bounded", "consensus"]


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
    start: Moment = (0, 3 * POINTS.index(flight.starts_at) + 2)
    end: Moment = (flight.lag, 3 * POINTS.index(flight.folds_at))
    place = 3 * POINTS.index(other.folds_at) + (1 if other.at_once else 0)
    common = math.gcd(flight.when.steps, other.when.steps)
    return any(
        start < (later, place) < end and (there + other.lag - here - later) % common == 0
        for later in range(flight.lag + 1)
        for here, there in itertools.product(_starts(flight), _starts(other))
    )


def promise_of(phases: Sequence[Sequence[Exchange]]) -> Promise:
    """What the exchanges of all phases let one expect."""
    if any(differ_between_ranks(exchanges) for exchanges in phases):
        return "consensus"
    every = [one for exchanges in phases for one in exchanges]
    exact = all((one.how is None or one.how.contraction == 1.0) and not one.lag for one in every)
    return "exact" if exact else "bounded"


def differ_between_ranks(exchanges: Sequence[Exchange]) -> bool:
    """Whether ranks hold different weights after some steps, by what the exchanges say.

    They do not if gradients are exchanged in every step with the same result for all, and so is all else.
    """
    sent = [one for one in exchanges if one.how is not None]
    uniform = all(one.how.uniform and one.how.lockstep for one in sent if one.how is not None)
    return not (uniform and any(_synchronizes(one) for one in sent))


def _synchronizes(exchange: Exchange) -> bool:
    return exchange.when.steps == 1 and exchange.then.replaces and "gradients" in exchange.writes
