"""The rule for the next epoch, and every order of events in which members die, stop, wake, are suspected, or come."""

import os
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pytest

from bagua.membership.epochs import Epoch, Standing, StopReport, first_epoch, next_epoch

UP, STOPPED, DEAD, OUT, DONE = "up", "stopped", "dead", "out", "done"
#: How far one rank of an island is in an attempt.
COMING, SENT, HAS_RESULT, FAILED = range(4)


class Actor(NamedTuple):
    """One island. ``standing`` is None while it has no state; ``at`` is then the epoch that it waits in."""

    how: str
    standing: Standing | None
    at: int  # number of the epoch whose cell it has read last
    lineage: tuple[int, ...] = ()  # the epoch whose members made each applied exchange
    made: int = 0  # the same of the result that it holds
    failed_in: int = 0  # of a newcomer: epoch in which it reported that it got no state
    ranks: tuple[int, ...] = ()  # how far each rank is in the attempt that is under way, or was the last one
    has: int = -1  # of a newcomer: number of the exchange whose state it has received
    asked: bool = False  # it has claimed what becomes of the exchange, and has heard no answer yet


class World(NamedTuple):
    """The store, all processes, and what has been sent."""

    actors: tuple[Actor, ...]
    cells: tuple[Epoch, ...]
    faults: int
    sent: frozenset[tuple[int, int, int, int]]  # (epoch, seat, exchange, rank): its contribution is with the others
    held: frozenset[tuple[int, int, int]]  # (epoch, seat, exchange): it holds the result
    calls: frozenset[tuple[int, int]]  # (epoch, exchange): the barrier has told that somebody waits
    silent: frozenset[tuple[int, int]]  # (epoch, exchange): the barrier has told that nobody does
    closed: frozenset[tuple[int, int, bool]]  # (epoch, exchange, counts): the cell that closes it through a bucket


class Rules(NamedTuple):
    """What is tried: members at the start, islands that come later, exchanges, faults, ranks of each; and the rules."""

    members: int
    exchanges: int
    faults: int
    comers: int = 0
    barrier: bool = True
    ranks: int = 1
    together: bool = True
    minimum: int | None = 1
    #: Newcomers can receive the state before they come in, and again if others went on.
    early: bool = True
    stale: bool = False  # found wrong: who has the state of an earlier exchange comes in, too
    bucket: bool = False
    cuts: bool = True  # an attempt may fail although nobody is gone
    asks: bool = True  # found wrong without: who stops asks first whether the exchange counts


Move = tuple[str, World]


class ViolationError(Exception):
    """Two processes hold different histories, or a process has applied what does not count."""


def start(rules: Rules) -> World:
    seats = tuple(range(rules.members))
    first = Epoch(1, seats)
    actors = [Actor(UP, Standing(seat, first), 1) for seat in seats] + [Actor(UP, None, 0)] * rules.comers
    return World(tuple(actors), (first,), rules.faults, *[frozenset()] * 5)


def moves(world: World, rules: Rules) -> Iterator[Move]:
    """All that can happen next."""
    for seat, actor in enumerate(world.actors):
        if actor.how == STOPPED:
            yield f"wake {seat}", _with(world, seat, actor._replace(how=UP))
        if actor.how == DEAD and rules.bucket and _is_in_attempt(actor):
            yield from _late(world, seat, actor, actor.standing)
        if actor.how != UP:
            continue
        if world.faults:
            lesser = world._replace(faults=world.faults - 1)
            yield f"kill {seat}", _with(lesser, seat, actor._replace(how=DEAD))
            yield f"stop {seat}", _with(lesser, seat, actor._replace(how=STOPPED))
        if actor.standing is None:
            yield from _as_newcomer(world, seat, actor, rules)
        elif actor.standing.report is None:
            yield from _taking_part(world, seat, actor, actor.standing, rules)
        else:
            yield from _between_epochs(world, seat, actor, actor.standing, rules)


def _with(world: World, seat: int, actor: Actor) -> World:
    return world._replace(actors=(*world.actors[:seat], actor, *world.actors[seat + 1 :]))


def _as_newcomer(world: World, seat: int, actor: Actor, rules: Rules) -> Iterator[Move]:
    number = max((cell.number for cell in world.cells if seat in cell.members), default=0)
    if number <= actor.failed_in or len(world.cells) > number:
        yield from _receive_early(world, seat, actor, rules)
        return
    epoch = world.cells[number - 1]
    if seat not in epoch.newcomers:
        come = actor._replace(standing=Standing.of_newcomer(seat, epoch), at=number)
        yield f"come in {seat}", _with(world, seat, come)
    givers = [world.actors[donor] for donor in epoch.donors if _gives(world.actors[donor], epoch)]
    for giver in {giver.lineage: giver for giver in givers}.values() if seat in epoch.newcomers else ():
        received = Standing.of_newcomer(seat, epoch)
        yield f"receive {seat}", _with(world, seat, actor._replace(standing=received, at=number, lineage=giver.lineage))
    others = [world.actors[other] for other in epoch.members if other != seat]
    well = bool(givers) if seat in epoch.newcomers else not any(_has_failed(other, number) for other in others)
    if world.faults or not well:
        lesser = world._replace(faults=world.faults - well)
        yield f"miss {seat}", _with(lesser, seat, actor._replace(failed_in=number))


def _gives(donor: Actor, epoch: Epoch) -> bool:
    """Whether a member offers the state that the epoch begins with."""
    standing = donor.standing
    here = donor.how == UP and standing is not None and standing.epoch.number == epoch.number
    return here and standing.report is None and standing.applied == epoch.base


def _receive_early(world: World, seat: int, actor: Actor, rules: Rules) -> Iterator[Move]:
    """From any member that is between two exchanges; nobody waits for it."""
    if not rules.early:
        return
    offered = {}
    for donor in world.actors:
        standing = donor.standing
        if donor.how == UP and standing is not None and standing.entered == standing.applied > actor.has:
            offered[standing.applied] = donor.lineage
    for has, lineage in offered.items():
        yield f"receive {seat} early", _with(world, seat, actor._replace(has=has, lineage=lineage))


def _taking_part(world: World, seat: int, actor: Actor, standing: Standing, rules: Rules) -> Iterator[Move]:
    epoch, number = standing.epoch, standing.epoch.number
    if standing.held < standing.entered:
        yield from _in_attempt(world, seat, actor, standing, rules)
        yield from (_closing if rules.bucket else _after_attempt)(world, seat, actor, standing, rules)
        return
    if not rules.together:
        yield from _in_attempt(world, seat, actor, standing, rules)
    others = [world.actors[other] for other in epoch.members if other != seat]
    if standing.entered == standing.applied:
        called = (number, standing.applied) in world.calls
        told = any(other.how == UP and _has_stopped(other, number) for other in others)
        if called or told or _sees_one_ready(world, standing):
            yield f"rest {seat}", _with(world, seat, actor._replace(standing=standing.stop(resting=True)))
        if not called and standing.applied < rules.exchanges:
            entered = standing.enter()
            ranks = (COMING if rules.bucket else SENT, *[COMING] * (rules.ranks - 1))
            sent = world.sent if rules.bucket else world.sent | {(number, seat, entered.entered, 0)}
            yield f"enter {seat}", _with(world, seat, actor._replace(standing=entered, ranks=ranks))._replace(sent=sent)
    elif all((number, other, standing.held) in world.held for other in epoch.members):
        yield from _pass_barrier(world, seat, actor, number, standing.held)
    broken = _with(world, seat, actor._replace(standing=standing.stop()))
    if any(_has_failed(other, number) for other in others):
        yield f"break {seat}", broken
    elif world.faults and rules.cuts and len(epoch.members) > 1:
        yield f"cut {seat}", broken._replace(faults=world.faults - 1)


def _in_attempt(world: World, seat: int, actor: Actor, standing: Standing, rules: Rules) -> Iterator[Move]:
    """Each rank exchanges with its counterparts."""
    number, exchange, members = standing.epoch.number, standing.entered, standing.epoch.members
    for rank, how in enumerate(actor.ranks):
        if how == COMING:
            sent = world.sent | {(number, seat, exchange, rank)}
            yield f"send {seat}.{rank}", _with(world, seat, _moved(actor, rank, SENT))._replace(sent=sent)
        if how == SENT and all((number, other, exchange, rank) in world.sent for other in members):
            yield f"reduce {seat}.{rank}", _with(world, seat, _moved(actor, rank, HAS_RESULT))
        if how in (COMING, SENT):
            broken = _with(world, seat, _moved(actor, rank, FAILED))
            over = _verdict(world, number, exchange) is False or len(world.cells) > number
            refused = any(_refuses(world.actors[other], number, rank) for other in members if other != seat)
            if over if rules.bucket else refused:
                yield f"break {seat}.{rank}", broken
            elif world.faults and rules.cuts and len(members) > 1:
                yield f"cut {seat}.{rank}", broken._replace(faults=world.faults - 1)


def _after_attempt(world: World, seat: int, actor: Actor, standing: Standing, rules: Rules) -> Iterator[Move]:
    """The ranks of the island have told each other how they fared."""
    number, exchange = standing.epoch.number, standing.entered
    if all(how == HAS_RESULT for how in (actor.ranks if rules.together else actor.ranks[:1])):
        after = actor._replace(standing=standing.hold(), made=number)
        if not rules.barrier:
            after = _applied(after)
        held = world.held | {(number, seat, exchange)}
        yield f"hold {seat}", _with(world, seat, after)._replace(held=held)
    elif COMING not in actor.ranks and SENT not in actor.ranks:
        yield f"give up {seat}", _with(world, seat, actor._replace(standing=standing.stop()))


def _verdict(world: World, number: int, exchange: int) -> bool | None:
    return next((counts for *place, counts in world.closed if place == [number, exchange]), None)


def _claimed(world: World, number: int, exchange: int, counts: bool) -> World:
    first = _verdict(world, number, exchange) is None
    return world._replace(closed=world.closed | {(number, exchange, counts)}) if first else world


def _closing(world: World, seat: int, actor: Actor, standing: Standing, rules: Rules) -> Iterator[Move]:
    """A member that sees another one gone claims that the exchange does not count. All obey the cell."""
    number, exchange, members = standing.epoch.number, standing.entered, standing.epoch.members
    verdict = _verdict(world, number, exchange)
    if verdict is None:
        if any(_has_failed(world.actors[other], number) for other in members if other != seat):
            yield f"ask {seat}", _claimed(world, number, exchange, False)
        elif world.faults and len(members) > 1:
            yield f"suspect {seat}", _claimed(world, number, exchange, False)._replace(faults=world.faults - 1)
    if COMING in actor.ranks or SENT in actor.ranks:
        return
    holds = FAILED not in actor.ranks
    if not holds and not rules.asks:
        yield f"give up {seat}", _with(world, seat, actor._replace(standing=standing.stop()))
    elif not actor.asked:
        claimed = _claimed(world, number, exchange, holds)
        yield f"claim {seat} {holds}", _with(claimed, seat, actor._replace(asked=True))
    elif not verdict:
        yield f"give up {seat}", _with(world, seat, actor._replace(standing=standing.stop(), asked=False))
    elif holds:
        after = actor._replace(standing=standing.hold(), made=number, asked=False)
        yield from _pass_barrier(world, seat, after, number, exchange)
    elif not rules.cuts and len(world.cells) == number:
        raise ViolationError(f"seat {seat} loses exchange {exchange}, to which it has contributed")
    else:
        after = actor._replace(how=OUT, standing=standing.stop(complete=False), asked=False)
        yield f"miss {exchange} {seat}", _with(world, seat, after)


def _is_in_attempt(actor: Actor) -> bool:
    standing = actor.standing
    return standing is not None and standing.report is None and standing.applied < standing.entered


def _late(world: World, seat: int, actor: Actor, standing: Standing) -> Iterator[Move]:
    """What a member had asked for before it died."""
    number, exchange = standing.epoch.number, standing.entered
    for rank, how in enumerate(actor.ranks):
        if how == COMING:
            sent = world.sent | {(number, seat, exchange, rank)}
            yield f"late put {seat}.{rank}", _with(world, seat, _moved(actor, rank, SENT))._replace(sent=sent)
    if COMING not in actor.ranks and SENT not in actor.ranks and not actor.asked:
        claimed = _claimed(world, number, exchange, FAILED not in actor.ranks)
        yield f"late claim {seat}", _with(claimed, seat, actor._replace(asked=True))


def _moved(actor: Actor, rank: int, how: int) -> Actor:
    return actor._replace(ranks=(*actor.ranks[:rank], how, *actor.ranks[rank + 1 :]))


def _refuses(other: Actor, number: int, rank: int) -> bool:
    """Whether the connection with a rank of ``other`` breaks, sooner or later."""
    standing = other.standing
    here = standing is not None and standing.epoch.number == number
    return _has_failed(other, number) or (here and standing.held < standing.entered and other.ranks[rank] == FAILED)


def _pass_barrier(world: World, seat: int, actor: Actor, number: int, exchange: int) -> Iterator[Move]:
    """All who pass one barrier hear the same of those who wait."""
    place, after = (number, exchange), _with(world, seat, _applied(actor))
    somebody = any(other.standing is None and other.how == UP for other in world.actors)
    if place not in world.calls:
        yield f"apply {seat}", after._replace(silent=world.silent | {place})
    if place in world.calls or (somebody and place not in world.silent):
        yield f"apply {seat} (called)", after._replace(calls=world.calls | {place})


def _applied(actor: Actor) -> Actor:
    _check_ranks(actor)
    return actor._replace(standing=actor.standing.apply(), lineage=(*actor.lineage, actor.made))


def _check_ranks(actor: Actor) -> None:
    """What an island takes in, each of its ranks has."""
    if any(how != HAS_RESULT for how in actor.ranks):
        raise ViolationError(f"seat {actor.standing.seat} takes in a result that some of its ranks do not have")


def _sees_one_ready(world: World, standing: Standing) -> bool:
    """Whether a process that waits has the state of the last exchange."""
    strangers = (one for seat, one in enumerate(world.actors) if seat not in standing.epoch.members)
    return any(one.standing is None and one.how == UP and one.has == standing.applied for one in strangers)


def _has_stopped(other: Actor, number: int) -> bool:
    standing = other.standing
    return standing is not None and standing.epoch.number == number and standing.report is not None


def _has_failed(other: Actor, number: int) -> bool:
    """Whether a connection to ``other`` breaks, sooner or later."""
    gone_on = other.standing is not None and other.standing.epoch.number > number
    return other.how != UP or other.failed_in >= number or gone_on or _has_stopped(other, number)


def _between_epochs(world: World, seat: int, actor: Actor, standing: Standing, rules: Rules) -> Iterator[Move]:
    number = standing.epoch.number
    if len(world.cells) > number:
        yield _follow(world, seat, actor, standing, world.cells[number], rules)
        return
    reports = {other: found for other in standing.epoch.members if (found := _report(world.actors[other], number))}
    unheard = [other for other in standing.epoch.members if other not in reports]
    well = [other for other in unheard if world.actors[other].how == UP]
    if len(well) > world.faults:
        return
    comers = {other: one for other, one in enumerate(world.actors) if one.standing is None and one.how == UP}
    ready = {other: one.has for other, one in comers.items() if rules.early}
    if rules.stale:
        ready = {other: standing.held for other, has in ready.items() if has >= 0}
    ended = [other for other in reports if world.actors[other].how != UP]
    for gone in [unheard, [*unheard, *ended]] if ended else [unheard]:
        proposal = next_epoch(
            standing.epoch, reports, dict.fromkeys(gone, "gone"), list(comers), rules.minimum, ready=ready
        )
        if isinstance(proposal, Epoch):
            cells = (*world.cells, proposal._replace(why=""))
            yield f"propose {seat} {proposal.members}", world._replace(cells=cells, faults=world.faults - len(well))


def _report(actor: Actor, number: int) -> StopReport | None:
    if actor.standing is None:
        return StopReport(number, complete=False) if actor.failed_in == number else None
    report = actor.standing.report
    return report if report is not None and report.epoch == number else None


def _follow(world: World, seat: int, actor: Actor, standing: Standing, cell: Epoch, rules: Rules) -> Move:
    if seat not in cell.members:
        return f"out {seat}", _with(world, seat, actor._replace(how=OUT))
    if not rules.barrier and standing.applied > cell.base:  # It cannot undo, so it goes on from where it is.
        after = actor._replace(standing=Standing(seat, cell, *[standing.applied] * 3), at=cell.number)
        again = range(cell.base + 1, standing.applied + 1)
        sent = {(cell.number, seat, done, rank) for done in again for rank in range(rules.ranks)}
        return f"follow {seat}", _with(world, seat, after)._replace(sent=world.sent | sent)
    if standing.applied > cell.base:
        raise ViolationError(f"seat {seat} has applied {standing.applied}, and {cell.base} counts")
    missed = (actor.made,) * (cell.base - standing.applied)
    after = actor._replace(standing=standing.follow(cell), at=cell.number, lineage=actor.lineage + missed)
    if missed and rules.bucket:
        raise ViolationError(f"seat {seat} takes in what no cell lists")
    if missed:
        _check_ranks(actor)
    return f"follow {seat}", _with(world, seat, after)


def check(world: World) -> None:
    """No two processes differ in what made any exchange, those included that were killed, stopped or left out."""
    found: dict[int, tuple[int, int]] = {}
    for seat, actor in enumerate(world.actors):
        if actor.standing is not None and len(actor.lineage) != actor.standing.applied:
            raise ViolationError(f"seat {seat} has a state of {len(actor.lineage)} exchanges: {actor.standing}")
        for exchange, made in enumerate(actor.lineage, start=1):
            other, elsewhere = found.setdefault(exchange, (seat, made))
            if elsewhere != made:
                raise ViolationError(f"exchange {exchange}: seat {seat} has epoch {made}'s, seat {other} {elsewhere}'s")


def explore(rules: Rules) -> int:
    """Run through all orders of events; the number of worlds. A violation tells the events that lead there."""
    first = start(rules)
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        if len(came_from) > 10_000_000:  # More would not fit in memory; nothing is known of the rest.
            raise RuntimeError(f"{rules}: {len(came_from)} worlds are found, and {len(todo)} not looked at")
        world = todo.popleft()
        try:
            check(world)
            found = list(moves(world, rules))
            _check_goes_on(world, found, rules)
        except ViolationError as violation:
            raise ViolationError(f"{violation}; after: {_story(world, came_from)}") from violation
        for name, reached in found:
            after = _without_past(reached, rules)
            if after not in came_from:
                came_from[after] = (world, name)
                todo.append(after)
    return len(came_from)


def _without_past(world: World, rules: Rules) -> World:
    """The same world, without what was sent in epochs to which nobody can go back."""
    present = [one.standing for one in world.actors if one.standing is not None and one.how in (UP, STOPPED)]
    oldest = min((standing.epoch.number for standing in present), default=0)
    kept = [frozenset(entry for entry in entries if entry[0] >= oldest) for entries in world[3:]]
    actors = tuple(
        _as_dead(actor) if actor.how in (DEAD, OUT) and not (rules.bucket and _is_in_attempt(actor)) else actor
        for actor in world.actors
    )
    return World(actors, world.cells, world.faults, *kept)


def _as_dead(actor: Actor) -> Actor:
    """Nobody can tell how far it was, but by its report and what it has applied."""
    standing = actor.standing
    if standing is not None:
        standing = standing._replace(entered=standing.applied, held=standing.applied)
    return actor._replace(standing=standing, ranks=(), made=0, has=-1)


def _check_goes_on(world: World, found: list[Move], rules: Rules) -> None:
    """No island waits without end: without another fault, who has the state comes to its end, or is out."""
    if any(not name.startswith(("kill", "stop", "wake", "cut", "late", "suspect")) for name, _ in found):
        return
    if any(actor.how == STOPPED for actor in world.actors):
        return
    for seat, actor in enumerate(world.actors):
        if actor.how == UP and actor.standing is not None and actor.standing.applied < rules.exchanges:
            raise ViolationError(f"seat {seat} waits without end")


def _story(world: World, came_from: dict[World, tuple[World, str] | None]) -> str:
    names = []
    while (step := came_from[world]) is not None:
        world, name = step
        names.append(name)
    return ", ".join(reversed(names))


_SHORT = [
    *(Rules(2, 2, 2), Rules(3, 1, 1), Rules(3, 2, 1), Rules(2, 2, 1, 1, early=False), Rules(2, 1, 0, 1)),
    *(Rules(1, 2, 1, 1), Rules(2, 2, 1, ranks=2)),
    *(Rules(2, 2, 1, bucket=True), Rules(3, 1, 1, bucket=True, cuts=False)),
    *(Rules(2, 1, 0, 1, bucket=True), Rules(2, 1, 1, bucket=True, ranks=2)),
]
_LONG = [
    *(Rules(3, 1, 2), Rules(2, 2, 2, 1, early=False), Rules(3, 2, 1, 1, early=False), Rules(2, 3, 1, 1, early=False)),
    *(Rules(4, 1, 1), Rules(1, 2, 1, 2, early=False), Rules(2, 1, 1, 1), Rules(2, 2, 1, 1), Rules(1, 1, 1, 2)),
    *(Rules(1, 3, 1, 1), Rules(2, 1, 2, ranks=2), Rules(3, 1, 1, ranks=2), Rules(2, 2, 2, ranks=2)),
    *(Rules(2, 2, 1, 1, ranks=2), Rules(3, 2, 1, ranks=2)),
    *(Rules(*counts, bucket=True, cuts=cuts) for counts in ((2, 2, 2), (3, 2, 1)) for cuts in (True, False)),
    *(Rules(3, 1, 1, bucket=True), Rules(2, 1, 1, 1, bucket=True)),
    Rules(3, 1, 2, bucket=True, cuts=False),
]
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
#: Rules that are found wrong, and how.
WRONG = {
    "without the barrier": (Rules(3, 1, 1, barrier=False), r"exchange 1: seat . has epoch"),
    "one rank holds": (Rules(2, 1, 1, ranks=2, together=False), "takes in a result that some of its ranks do not have"),
    "an older state of a newcomer": (Rules(1, 2, 0, 1, stale=True), "seat 1 has a state of 0 exchanges"),
    "who stops asks no cell": (Rules(2, 1, 1, bucket=True, asks=False), r"seat . has applied 1, and 0 counts"),
}
if THOROUGH:
    WRONG["two ranks without it"] = (Rules(3, 1, 1, barrier=False, ranks=2), r"exchange 1: seat . has epoch")


@pytest.mark.parametrize("rules", _SHORT + (_LONG if THOROUGH else []), ids=str)
def test_no_order_of_events_lets_members_or_their_ranks_differ_or_wait_for_ever(rules):
    assert explore(rules) > 500


@pytest.mark.parametrize(("rules", "why"), WRONG.values(), ids=WRONG)
def test_another_rule_is_found_wrong(rules, why):
    with pytest.raises(ViolationError, match=why):
        explore(rules)


@pytest.mark.parametrize("base", [max, lambda held: min(held) - 1], ids=["too high", "too low"])
def test_another_base_is_found_wrong(base, monkeypatch):
    right = next_epoch

    def other(epoch, reports, *rest, **more):
        proposal = right(epoch, reports, *rest, **more)
        if isinstance(proposal, str):
            return proposal
        return proposal._replace(base=max(0, base([reports[seat].held for seat in proposal.donors])))

    monkeypatch.setattr("tests.membership.test_protocol.next_epoch", other)
    with pytest.raises((ViolationError, AssertionError)):
        explore(Rules(3, 2, 1))


EPOCH = Epoch(3, (0, 2, 5, 6), base=7)


def reports(held: dict[int, int], **facts: bool) -> dict[int, StopReport]:
    return {seat: StopReport(3, number, **facts) for seat, number in held.items()}


FIVE, SIX = (f"seat {seat} is not in it: it died" for seat in (5, 6))
TOO_FEW = "seats 0, 2 are not more than half of seats 0, 2, 5, 6 (seat 5: it died; seat 6: it died)"
#: What each seat holds, who is gone, who said goodbye, and what comes of it.
ANSWERS = {
    "everybody who is not gone is waited for": ({0: 8, 2: 7}, [5], (), "waiting for seat 6"),
    "results that all hold count": ({0: 8, 2: 7, 6: 8}, [5], (), Epoch(4, (0, 2, 6), 7, (), FIVE)),
    "half is not more than half": ({0: 8, 2: 8}, [5, 6], (), TOO_FEW),
    "who said goodbye is not missed": ({0: 8, 2: 8}, [5, 6], {6}, Epoch(4, (0, 2), 8, (), f"{FIVE}; {SIX}")),
}


@pytest.mark.parametrize(("held", "gone", "left", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_the_next_epoch_follows_from_reports(held, gone, left, answer):
    assert next_epoch(EPOCH, reports(held), dict.fromkeys(gone, "it died"), left=left) == answer


@pytest.mark.parametrize(
    ("minimum", "waiting", "members"),
    [(2, [], (0, 2)), (3, [], None), (3, [9], (0, 2)), (4, [9], None), (5, [8, 9], None)],
)
def test_a_minimum_counts_those_who_wait(minimum, waiting, members):
    after = next_epoch(EPOCH, reports({0: 8, 2: 8}), dict.fromkeys((5, 6), "it died"), waiting, minimum)
    assert getattr(after, "members", None) == members


def test_newcomers_come_in_when_all_rest():
    resting = reports({0: 8, 2: 8, 5: 8, 6: 8}, resting=True)
    after = next_epoch(EPOCH, resting, {}, [9, 7])
    assert (after.members, after.newcomers, after.donors) == ((0, 2, 5, 6, 7, 9), (7, 9), (0, 2, 5, 6))
    resting[2] = resting[2]._replace(resting=False)
    assert next_epoch(EPOCH, resting, {}, [9, 7]).newcomers == ()


@pytest.mark.parametrize("resting", [True, False])
def test_who_has_the_state_comes_in_with_any_change(resting):
    said = reports({0: 8, 2: 8, 5: 9, 6: 8}, resting=resting)
    after = next_epoch(EPOCH, said, {}, ready={7: 8, 8: 7, 9: -1})
    assert (after.members, after.newcomers, after.base, after.why) == ((0, 2, 5, 6, 7), (), 8, "seat 7 came")


def test_who_has_no_state_has_no_say():
    epoch = Epoch(1, (0, 1, 2), newcomers=(1, 2))
    without = {seat: StopReport(1, complete=False) for seat in (1, 2)}
    assert next_epoch(epoch, without, {0: "it died"}).startswith("no member that is left has the state")
    after = next_epoch(epoch, {0: StopReport(1, resting=True), **without}, {}, [1, 2])
    assert (after.members, after.newcomers) == ((0, 1, 2), (1, 2))


@pytest.mark.parametrize(
    ("number", "held", "missed"), [(1, [0], "1, 2"), (4, [7], None), (4, [8], "1, 2"), (4, [7, 7], "1")]
)
def test_newcomers_that_are_lost_are_missed_unless_they_had_no_state_yet(number, held, missed):
    epoch = Epoch(number, (0, 1, 2), 0 if number == 1 else 7, newcomers=(1, 2))
    said = {seat: StopReport(number, exchanges) for seat, exchanges in enumerate(held)}
    after = next_epoch(epoch, said, dict.fromkeys((1, 2), "it died"))
    assert isinstance(after, Epoch) is (missed is None)
    assert missed is None or after.startswith(f"seat 0 are not more than half of seats 0, {missed} (")


def test_the_first_epoch_has_one_donor():
    assert first_epoch([4, 1, 2])[:4] == (1, (1, 2, 4), 0, (2, 4))


def test_a_standing_refuses_what_the_protocol_forbids():
    begun = Standing(0, EPOCH, 7, 7, 7).enter()
    applied, entered = begun.hold().apply().stop(), begun.stop()
    follows = partial(applied.follow, Epoch(4, (0,), base=7)), partial(entered.follow, Epoch(4, (2,), base=7))
    for forbidden in (begun.enter, begun.apply, *follows):
        with pytest.raises(AssertionError):
            forbidden()
