"""Every order of events: members, a store, and what can go wrong, run through without time, threads or sockets.

The steps of members are those of ``bagua.membership.epochs``; what is simulated is who makes the next step, and who
dies, stops, wakes, is taken for dead while it is well, or comes. An actor is an island: each rank of it exchanges with
its counterparts, in any order, and what the island holds all of them hold.

Through a bucket, each put, each get and each claim is a step of its own, so members die and stop before and after each.
A request of a member that dies may arrive later. A store that answers late, or with an old list, or is asked twice,
adds no world: no member decides anything because it has not found something, but by a claim.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from bagua.membership.epochs import Epoch, Standing, StopReport, next_epoch

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


class UnfinishedError(Exception):
    """There are more worlds than are run through, so nothing is known of the rest."""


def start(rules: Rules) -> World:
    seats = tuple(range(rules.members))
    first = Epoch(1, seats)
    actors = [Actor(UP, Standing(seat, first), 1) for seat in seats] + [Actor(UP, None, 0)] * rules.comers
    nothing: frozenset = frozenset()
    return World(tuple(actors), (first,), rules.faults, nothing, nothing, nothing, nothing, nothing)


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
    if number <= actor.failed_in:
        yield from _receive_early(world, seat, actor, rules)
        return
    epoch = world.cells[number - 1] if number else None
    if epoch is None or len(world.cells) > number:
        yield from _receive_early(world, seat, actor, rules)
        return
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
        if called or _sees_one_ready(world, standing) or any(_reports(other, number) for other in others):
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


def _reports(other: Actor, number: int) -> bool:
    return other.how == UP and other.standing is not None and _has_stopped(other.standing, number)


def _has_failed(other: Actor, number: int) -> bool:
    """Whether a connection to ``other`` breaks, sooner or later."""
    if other.how != UP or other.failed_in >= number:
        return True
    standing = other.standing
    return standing is not None and (standing.epoch.number > number or _has_stopped(standing, number))


def _has_stopped(standing: Standing, number: int) -> bool:
    return standing.epoch.number == number and standing.report is not None


def _between_epochs(world: World, seat: int, actor: Actor, standing: Standing, rules: Rules) -> Iterator[Move]:
    number = standing.epoch.number
    if len(world.cells) > number:
        yield _follow(world, seat, actor, standing, world.cells[number], rules)
        return
    reports = {other: report for other in standing.epoch.members if (report := _report(world, other, number))}
    unheard = [other for other in standing.epoch.members if other not in reports]
    well = [other for other in unheard if world.actors[other].how == UP]
    if len(well) > world.faults:
        return
    comers = {other: one for other, one in enumerate(world.actors) if one.standing is None and one.how == UP}
    ready = {other: one.has for other, one in comers.items() if rules.early}
    if rules.stale:
        ready = dict.fromkeys((other for other in ready if ready[other] >= 0), standing.held)
    ended = [other for other in reports if world.actors[other].how != UP]
    for gone in [unheard, [*unheard, *ended]] if ended else [unheard]:
        proposal = next_epoch(
            standing.epoch, reports, dict.fromkeys(gone, "gone"), list(comers), rules.minimum, ready=ready
        )
        if isinstance(proposal, Epoch):
            cells = (*world.cells, proposal._replace(why=""))
            yield f"propose {seat} {proposal.members}", world._replace(cells=cells, faults=world.faults - len(well))


def _report(world: World, seat: int, number: int) -> StopReport | None:
    actor = world.actors[seat]
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


def explore(rules: Rules, most: int = 10_000_000) -> int:
    """Run through all orders of events; the number of worlds.

    Args:
        rules: what is tried.
        most: number of worlds, beyond which memory would not do.

    Raises:
        ViolationError: with the events that lead there.
        UnfinishedError: there are more worlds.
    """
    first = start(rules)
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    todo = deque([first])
    while todo:
        if len(came_from) > most:
            raise UnfinishedError(f"{rules}: {len(came_from)} worlds are found, and {len(todo)} not looked at")
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
    present = [
        actor.standing.epoch.number
        for actor in world.actors
        if actor.standing is not None and actor.how in (UP, STOPPED)
    ]
    oldest = min(present, default=0)
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
        applied = standing.applied
        standing = standing._replace(entered=applied, held=applied)
    return actor._replace(standing=standing, ranks=(), made=0, has=-1)


def _check_goes_on(world: World, found: list[Move], rules: Rules) -> None:
    """No island waits without end: without another fault, who has the state comes to its end, or is out."""
    if any(not name.startswith(("kill", "stop", "wake", "cut", "late", "suspect")) for name, _ in found):
        return
    if any(actor.how == STOPPED for actor in world.actors):
        return
    for seat, actor in enumerate(world.actors):
        behind = actor.standing is not None and actor.standing.applied < rules.exchanges
        if actor.how == UP and behind:
            raise ViolationError(f"seat {seat} waits without end")


def _story(world: World, came_from: dict[World, tuple[World, str] | None]) -> str:
    names = []
    while (step := came_from[world]) is not None:
        world, name = step
        names.append(name)
    return ", ".join(reversed(names))
