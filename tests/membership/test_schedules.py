"""Schedules of `benchmarks.chaos`: 200 seeds on the simulation of the protocol, some on islands that are threads."""

from __future__ import annotations

import itertools
import os
import random
import threading

import pytest

from bagua.comm.transports.threads import inject_fault
from bagua.membership import participant
from bagua.testing.ranks import RankDiedError
from benchmarks.chaos import Fault, draw_schedule
from tests.membership.simulation import (
    OUT,
    STOPPED,
    UP,
    Actor,
    Rules,
    ViolationError,
    World,
    check,
    moves,
    start,
)
from tests.membership.training import (
    PERIOD,
    Outer,
    check_equal,
    check_rows,
    joined,
    new_store,
    run,
    survivors,
    train,
    vanish,
    wrapped,
)

MEMBERS, EXCHANGES = 4, 12
#: Each move takes a second. A run of so many exchanges takes about as many as the schedule lasts, and faults add some.
DURATION_S, MOST_MOVES = 160.0, 4000
MIX = {"kill": 28.0, "stop": 8.0, "partition": 9.0}


class Walk:
    """One order of events: faults come as the schedule says, and who makes the next step is drawn."""

    def __init__(self, seed: int, *, barrier: bool = True) -> None:
        self.rules = Rules(MEMBERS, EXCHANGES, faults=0, barrier=barrier)
        self.world: World = start(self.rules)
        self.draw = random.Random(seed)
        self.faults = draw_schedule(seed, MEMBERS, DURATION_S, 8, MIX, (5.0, 40.0))
        self.hit: list[str] = []
        self._wakes: dict[int, float] = {}

    def run(self) -> list[Actor]:
        """Go on until all have made all exchanges, or the schedule's last fault; those who have."""
        for now in range(MOST_MOVES):
            check(self.world)
            self._restart()
            if self.faults and self.faults[0].at_s <= now:
                self._strike(self.faults.pop(0), now)
                continue
            self._wakes = {seat: at for seat, at in self._wakes.items() if self.world.actors[seat].how == STOPPED}
            asleep = {f"wake {seat}" for seat, at in self._wakes.items() if at > now}
            possible = [move for move in moves(self.world, self.rules) if move[0] not in asleep]
            if possible:
                self.world = self.draw.choice(possible)[1]
            elif not self._wakes and (not self.faults or self._finished()):
                return self._finished()
        raise ViolationError(f"no end after {MOST_MOVES} moves; {self.world}")

    def _finished(self) -> list[Actor]:
        actors = [actor for actor in self.world.actors if actor.how == UP and actor.standing is not None]
        behind = [actor for actor in actors if actor.standing.applied < EXCHANGES]
        if behind and not (self.faults or self._wakes):
            raise ViolationError(f"{behind} wait without end")
        return [actor for actor in actors if actor.standing.applied == EXCHANGES]

    def _restart(self) -> None:
        """Who ended, by a kill or because the others went on, comes again as a newcomer."""
        for seat, actor in enumerate(self.world.actors):
            if actor.how == OUT or (actor.how == "dead" and actor.failed_in >= 0):
                gone = actor._replace(how="dead", failed_in=-1)
                others = self.world.actors[:seat], self.world.actors[seat + 1 :]
                self.world = self.world._replace(actors=(*others[0], gone, *others[1], Actor(UP, None, 0)))

    def _strike(self, fault: Fault, now: float) -> None:
        """Let a fault happen to one of those who have the state, as long as another one is left."""
        cell = self.world.cells[-1]
        well = [
            seat
            for seat in cell.members
            if self.world.actors[seat].how == UP and self.world.actors[seat].standing is not None
        ]
        if len(well) < 2:
            return
        victim = well[fault.members[0] % len(well)]
        word = {"kill": "kill", "stop": "stop", "partition": "cut" if self.draw.random() < 0.5 else "stop"}[fault.kind]
        lesser = self.world._replace(faults=1)
        after = dict(moves(lesser, self.rules)).get(f"{word} {victim}")
        if after is None:  # Nothing is under way that could be cut.
            return
        self.world = after._replace(faults=0)
        self.hit.append(word)
        if self.world.actors[victim].how == STOPPED:
            self._wakes[victim] = now + fault.lasting_s


def test_200_schedules_end_with_one_history() -> None:
    words: set[str] = set()
    newcomers = 0
    for seed in range(200):
        walk = Walk(seed)
        try:
            finished = walk.run()
        except (ViolationError, AssertionError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert finished, seed
        assert len({actor.lineage for actor in finished}) == 1, seed
        words.update(walk.hit)
        newcomers += sum(seat >= MEMBERS for seat in walk.world.cells[-1].members)
    assert words == {"kill", "stop", "cut"}
    assert newcomers > 200


def test_without_the_barrier_the_same_schedules_find_two_histories() -> None:
    with pytest.raises((ViolationError, AssertionError)):
        for seed in range(200):
            Walk(seed, barrier=False).run()


#: Deaths of first members on threads; as many newcomers come.
DEATHS = 2
THREAD_SEEDS = range(100 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 5)


@pytest.mark.threads
@pytest.mark.parametrize("seed", THREAD_SEEDS)
def test_islands_that_die_and_come_as_drawn_train_as_plain_torch_does(seed: int, monkeypatch) -> None:
    """Who dies, at which step of which exchange, is drawn; a newcomer comes for each. All agree bit by bit.

    With even seeds newcomers receive the state while others train on, and contribute what they have in the rest of the
    period; how much that is depends on the moment.
    """
    early = seed % 2 == 0
    monkeypatch.setattr(participant, "_ROUNDS", participant._ROUNDS if early else 0)
    draw = random.Random(seed)
    died = [threading.Event() for _ in range(DEATHS)]
    doomed = dict(zip(draw.sample(range(MEMBERS), DEATHS), range(DEATHS), strict=True))
    steps = [12 + int(40 * draw.random()) for _ in range(DEATHS)]

    def island(store):
        number = next(roles)
        if number >= MEMBERS:
            assert died[number - MEMBERS].wait(60.0)
        with joined(store, MEMBERS) as islands:
            passed = itertools.count()

            def fault(step):
                if islands.seat in doomed and next(passed) == steps[doomed[islands.seat]]:
                    died[doomed[islands.seat]].set()
                    vanish(islands)

            with inject_fault(fault):
                return _train_until_newcomers_contribute(islands, wrapped(islands, "diloco"))

    roles = itertools.count()
    ends = run(MEMBERS + DEATHS, island, new_store(), deadline_s=100.0)
    rows = survivors(ends)
    assert sum(isinstance(end, RankDiedError) for end in ends) == DEATHS, ends
    assert len(rows) == MEMBERS, ends
    by_step = check_equal(rows)
    contributed = [by_step[max(by_step)].contributed] if early else check_rows("diloco", rows)
    assert set(contributed[-1]) == {seat for seat in range(MEMBERS + DEATHS) if seat not in doomed}


def _train_until_newcomers_contribute(islands, model) -> list[Outer]:
    """The same outer step is the last one of all: all see who contributed to it."""
    found: list[Outer] = []
    while not found or set(range(MEMBERS, MEMBERS + DEATHS)) - set(found[-1].contributed):
        step = model.bagua_step
        found += train(islands, model, step + PERIOD - step % PERIOD)
    return found
