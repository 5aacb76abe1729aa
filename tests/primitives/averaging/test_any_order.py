"""Whatever the order in which ranks train, look, abort, leave, diverge and die: nobody hangs, nobody is harmed."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bagua.averaging.membership import MemberState
from tests.primitives.averaging.world import World

SIZE = 4
RANKS = st.integers(0, SIZE - 1)


class AnyOrder(RuleBasedStateMachine):
    """At each moment one rank does one thing. In the end all who live call ``abort``, and must come to an end."""

    @initialize(
        mode=st.sampled_from(["all", "shift_one", "random_pair", "ring"]),
        continue_alone=st.booleans(),
        warming=st.sampled_from([False, False, False, True]),
        calm=st.booleans(),
    )
    def begin(self, mode: str, continue_alone: bool, warming: bool, calm: bool) -> None:
        self.world = World(SIZE, mode, continue_alone=continue_alone, warming=warming)
        self.diverged: set[int] = set()
        self.calm = calm
        self.disturbed = False

    def _here(self, number: int):
        rank = self.world.ranks[number]
        return rank if number not in self.world.dead and not rank.member.over else None

    def train(self, number: int, step: int) -> None:
        rank = self._here(number)
        if rank is not None and not rank.member.pausing:
            rank.train(float(step))

    @rule(steps=st.lists(st.integers(-3, 3), min_size=SIZE, max_size=SIZE))
    def everybody_trains(self, steps: list[int]) -> None:
        for number, step in enumerate(steps):
            self.train(number, step)

    @rule(numbers=st.lists(RANKS, min_size=3, max_size=12))
    def look(self, numbers: list[int]) -> None:
        for number in numbers:
            self.world.poll(number)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0]), turns=st.integers(1, 6))
    def everybody_looks(self, seconds: float, turns: int) -> None:
        self.world.run(turns, seconds)

    @rule()
    def end_warm_up(self) -> None:
        for rank in self.world.ranks:
            if not rank.member.pausing:
                rank.member.warming = False

    @rule(number=RANKS)
    def abort(self, number: int) -> None:
        if self._here(number) is not None:
            self.world.abort(number)

    @rule(number=RANKS)
    def wait_in_abort(self, number: int) -> None:
        rank = self._here(number)
        if rank is not None and rank.member.pausing:
            rank.at_safe_point(at_rest=True)

    @rule(number=RANKS)
    @precondition(lambda self: not self.calm and not self.disturbed)
    def leave(self, number: int) -> None:
        if self._here(number) is not None:
            self.world.ranks[number].member.leaving = "it has something better to do"
            self.disturbed = True

    @rule(number=RANKS)
    @precondition(lambda self: not self.calm and not self.disturbed)
    def die(self, number: int) -> None:
        self.world.kill(number)
        self.disturbed = True

    @rule(number=RANKS)
    @precondition(lambda self: not self.calm and not self.disturbed)
    def diverge(self, number: int) -> None:
        rank = self._here(number)
        if rank is not None:
            rank.weights.fill_(float("nan"))
            self.diverged.add(number)
            self.disturbed = True

    @rule(times=st.integers(1, 3))
    @precondition(lambda self: not self.calm and not self.disturbed)
    def refuse_to_open(self, times: int) -> None:
        self.world.refuse_to_open = times
        self.disturbed = True

    @rule()
    @precondition(lambda self: not self.calm and not self.disturbed and self.world.wires)
    def cut_the_latest_wire(self) -> None:
        list(self.world.wires.values())[-1].cut = True
        self.disturbed = True

    @invariant()
    def nobody_waits_for_a_rank_that_will_not_come(self) -> None:
        if not hasattr(self, "world"):
            return
        for rank in self.world.living():
            if rank.transfer is None:
                continue
            _, connection, _ = rank.transfer
            wire = self.world.wires[connection.name]
            for number in connection.members:
                member = self.world.ranks[number].member
                came = any(number in exchange and rank.rank in exchange for exchange in wire.exchanges)
                behind = member._round <= rank.member._round and not member.over
                will_be_noticed = number in self.world.dead or wire.broken or wire.cut
                has_said_so = member._view._last.broke == rank.member._round
                assert came or behind or will_be_noticed or has_said_so

    @invariant()
    def what_is_not_finite_stays_where_it_is(self) -> None:
        if not hasattr(self, "world"):
            return
        for rank in self.world.ranks:
            if rank.rank not in self.diverged:
                assert torch.isfinite(rank.weights).all()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.run_to_the_end()
        self.what_is_not_finite_stays_where_it_is()
        together = [rank for rank in self.world.living() if rank.member.state is MemberState.STOPPED]
        if not self.disturbed:
            assert len(together) == SIZE
            assert not any(rank.member.error for rank in self.world.ranks)
            if not any(rank.member.warming for rank in together):
                assert all(torch.equal(rank.weights, together[0].weights) for rank in together)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)
