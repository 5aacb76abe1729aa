"""Orderings that went wrong elsewhere, one by one: what a session does when somebody is early, late, gone or wrong."""

from __future__ import annotations

import pytest
import torch

from bagua.averaging.handoff import Stage
from bagua.averaging.membership import MemberState
from bagua.averaging.round_protocol import FINAL
from bagua.errors import CommunicatorClosedError, NonFiniteError, PeerLostError
from tests.primitives.averaging.world import PATIENCE, World


def values(world: World) -> list[float]:
    return [rank.weights[0].item() for rank in world.ranks]


def one_round(world: World) -> None:
    for rank in world.ranks:
        rank.train(0.0)
    world.run(6)


def test_an_average_keeps_what_was_learned_meanwhile():
    world = World(3)  # 1, 2, 3
    for rank in world.ranks:
        rank.train(10.0 * rank.rank)  # after the snapshot
    world.run(6)
    for rank in world.ranks:
        rank.at_safe_point()
    assert values(world) == [2.0, 12.0, 22.0]


def test_a_round_waits_for_the_slowest_but_no_training_thread_does():
    world = World(2)
    for _ in range(50):
        world.ranks[0].train(1.0)
        world.run(2)
    assert world.ranks[0].member.progress.rounds == 0
    assert world.ranks[0].handoff.stage is Stage.SNAPSHOT
    world.ranks[1].train(0.0)
    world.run(6)
    world.ranks[0].at_safe_point()
    assert values(world)[0] == 1.0 + 50.0 + (1.5 - 1.0)


def test_in_pairs_a_round_waits_for_one_other_rank_only():
    world = World(4, "shift_one")  # (0, 2), (1, 3) meet first
    for number in (0, 2):
        world.ranks[number].train(0.0)
    world.run(6)
    assert [rank.member.progress.rounds for rank in world.ranks] == [1, 0, 1, 0]
    assert world.ranks[0].member.progress.members == (0, 2)


def test_whoever_waits_in_abort_takes_part_with_its_final_weights():
    world = World(2)
    world.abort(0)
    for _ in range(5):
        world.ranks[1].train(1.0)
        world.run(6)
    assert world.ranks[1].member.progress.rounds == 5
    assert not world.ranks[0].member.over
    world.run_to_the_end()
    assert torch.equal(world.ranks[0].weights, world.ranks[1].weights)
    assert {rank.member.state for rank in world.ranks} == {MemberState.STOPPED}


def test_abort_while_a_round_is_agreed_on_lets_the_round_happen():
    world = World(2)
    for rank in world.ranks:
        rank.train(0.0)
    world.poll(0)
    world.poll(1)  # has said go
    world.abort(0, 1)
    assert world.ranks[1].transfer is not None
    world.run_to_the_end()
    assert world.ranks[0].member.progress.rounds == world.ranks[1].member.progress.rounds == 2
    assert values(world) == [1.5, 1.5]


def test_a_snapshot_from_before_abort_is_not_the_last_word():
    world = World(2)
    world.ranks[0].train(100.0)  # The snapshot is older than this step.
    world.run(3)
    world.run_to_the_end()
    assert values(world) == [(101.0 + 2.0) / 2] * 2


def test_nothing_is_averaged_at_the_end_of_a_session_without_training():
    world = World(3)
    for rank in world.ranks:
        rank.member.fresh = True
    world.run_to_the_end()
    assert values(world) == [1.0, 2.0, 3.0]
    assert not world.wires


def test_a_leaver_takes_back_that_it_was_ready():
    world = World(3)
    world.ranks[2].train(0.0)
    world.run(2)  # Rank 2 is ready and waits.
    world.ranks[2].member.leaving = "its data is exhausted"
    for number in (0, 1):
        world.ranks[number].train(0.0)
    world.poll(2)
    world.run(6)
    assert world.ranks[2].member.state is MemberState.LEFT
    assert [world.ranks[number].member.progress.members for number in (0, 1)] == [(0, 1), (0, 1)]
    assert all(rank.member.error is None for rank in world.ranks)


def test_a_leaver_on_whom_others_count_already_takes_part_first():
    world = World(2)
    for rank in world.ranks:
        rank.train(0.0)
    world.poll(0)
    world.poll(1)  # go
    world.ranks[0].member.leaving = "the end"
    world.run(6)
    assert world.ranks[1].member.progress.rounds == 1
    assert world.ranks[0].member.state is MemberState.LEFT


def test_a_leaver_goes_right_after_the_exchange_in_which_it_was():
    world = World(2)
    one = world.ranks[0].member
    for rank in world.ranks:
        rank.train(0.0)
    while world.ranks[0].transfer is None:
        world.run(1)
    one.leaving = "the end"
    pause_s = one.poll()  # The exchange is complete; it consumed the call to look.
    assert world.ranks[0].transfer is None
    assert one.state is MemberState.TRAINING
    assert pause_s < PATIENCE.beat_s / 10
    world.run(2)
    assert one.state is MemberState.LEFT


@pytest.mark.parametrize("continue_alone", [True, False])
def test_a_rank_that_dies_between_its_word_and_the_exchange(continue_alone):
    world = World(3, continue_alone=continue_alone)
    for rank in world.ranks:
        rank.train(0.0)
    world.poll(2)
    world.poll(1)
    world.kill(2)
    world.poll(0)  # does not know, and says go
    world.run(30, seconds_per_turn=1.0)
    survivors = world.ranks[:2]
    if continue_alone:
        assert [rank.member.progress.members for rank in survivors] == [(0, 1), (0, 1)]
        assert values(world)[:2] == [1.0, 2.0]
        world.run_to_the_end()
        assert values(world)[:2] == [1.5, 1.5]
    else:
        for rank in survivors:
            assert isinstance(rank.member.error, PeerLostError)
            assert rank.member.error.peers == (2,)
            assert rank.member.over
            rank.at_safe_point()
        assert values(world)[:2] == [1.0, 2.0]


def test_a_rank_that_is_only_slow_is_not_lost():
    world = World(2)
    for _ in range(100):
        world.ranks[0].train(1.0)
        world.run(1, seconds_per_turn=PATIENCE.beat_s)  # Rank 1 beats, and takes no step.
    assert all(rank.member.error is None and not rank.member.over for rank in world.ranks)


def test_after_a_machine_has_slept_nobody_is_taken_for_dead():
    world = World(2)
    world.run(5)
    world.pass_time(10_000.0)
    world.poll(0)
    world.poll(1)
    world.run(5, seconds_per_turn=1.0)
    assert all(rank.member.error is None for rank in world.ranks)


@pytest.mark.parametrize("continue_alone", [True, False])
def test_who_was_taken_for_dead_learns_it(continue_alone):
    world = World(3, continue_alone=continue_alone)
    world.run(3)
    for _ in range(20):  # The background thread of rank 2 stands still.
        for number in (0, 1):
            world.poll(number)
        world.pass_time(1.0)
    world.run(5)
    last = world.ranks[2].member
    assert last.over
    if not continue_alone:
        assert "took this one for dead" in str(last.error)


def test_not_finite_weights_do_not_leave_their_rank():
    world = World(3)
    world.ranks[1].weights[2] = float("inf")
    one_round(world)
    errors = [rank.member.error for rank in world.ranks]
    assert [error.rank for error in errors if isinstance(error, NonFiniteError)] == [1, 1, 1]
    assert values(world)[::2] == [1.0, 3.0]
    assert not world.wires


def test_without_diverged_ranks_the_others_go_on():
    world = World(3, continue_alone=True)
    world.ranks[1].weights.fill_(float("nan"))
    one_round(world)
    one_round(world)
    assert isinstance(world.ranks[1].member.error, NonFiniteError)
    assert world.ranks[0].member.error is None
    assert values(world)[::2] == [2.0, 2.0]


def test_an_average_that_overflows_is_dropped():
    world = World(2)
    for rank in world.ranks:
        rank.weights.fill_(1.7e308)  # Their sum is not finite.
    one_round(world)
    assert [rank.member.progress.overflowed for rank in world.ranks] == [1, 1]
    for rank in world.ranks:
        rank.at_safe_point()
    assert values(world) == [1.7e308] * 2


def test_an_exchange_that_one_rank_could_not_begin_is_tried_again():
    world = World(2)
    world.refuse_to_open = 1
    one_round(world)
    world.run(20, seconds_per_turn=0.2)
    assert [rank.member.progress.failed for rank in world.ranks] == [1, 1]
    assert [rank.member.progress.rounds for rank in world.ranks] == [1, 1]


def test_a_decision_is_kept_until_all_have_read_it():
    world = World(2)
    for rank in world.ranks:
        rank.train(0.0)
    world.poll(1)
    world.refuse_to_open = 1
    for _ in range(5):
        world.poll(0)  # says go, cannot connect, and goes on to the next round
        world.pass_time(0.1)
    world.run(20, seconds_per_turn=0.2)
    assert [rank.member.progress.rounds for rank in world.ranks] == [1, 1]


def test_a_rank_that_waits_for_a_connection_with_the_dead_is_not_taken_for_dead():
    world = World(3, continue_alone=True)
    for rank in world.ranks:
        rank.train(0.0)
    world.poll(2)
    world.poll(0)
    world.kill(2)

    def fail_at_once() -> None:
        raise PeerLostError("nobody answers", peers=(1, 2))

    def fail_late() -> None:
        for _ in range(2 * int(PATIENCE.suspect_s)):
            world.pass_time(1.0)
            world.poll(0)
        raise CommunicatorClosedError("somebody did not come")

    world.while_opening.update({0: fail_at_once, 1: fail_late})
    world.poll(1)  # go
    world.run(30, seconds_per_turn=1.0)
    assert [rank.member.progress.members for rank in world.living()] == [(0, 1), (0, 1)]


def test_an_exchange_that_keeps_failing_is_an_error():
    world = World(2)
    world.refuse_to_open = 1_000
    one_round(world)
    world.run(20, seconds_per_turn=0.2)
    assert all(rank.member.error is not None for rank in world.ranks)


def test_the_last_exchange_is_tried_twice():
    world = World(2)
    one_round(world)
    world.abort(0, 1)
    while world.ranks[0].transfer is None or world.ranks[0].member._round < FINAL:
        world.run(1)
    list(world.wires.values())[-1].cut = True
    world.run_to_the_end()
    assert values(world)[0] == values(world)[1]


@pytest.mark.parametrize("continue_alone", [True, False])
def test_who_misses_the_last_average_does_not_say_that_all_is_well(continue_alone):
    world = World(2, continue_alone=continue_alone)
    one_round(world)
    world.abort(0, 1)
    cut = 0
    for _ in range(200):
        world.run(1)
        for rank in world.ranks:
            if rank.transfer is not None and rank.member._round >= FINAL:
                world.wires[rank.transfer[1].name].cut = True
                cut += 1
    assert cut
    for rank in world.ranks:
        assert rank.member.over
        assert "the last average broke off" in str(rank.member.apart)
        assert rank.member.error is (None if continue_alone else rank.member.apart)
    assert values(world) == [1.5, 1.5]  # of the round before


def test_those_who_leave_before_the_last_average_do_not_take_it_from_the_others():
    world = World(4)
    for rank in world.ranks:
        rank.member.fresh = False
    world.abort(0, 1, 2, 3)
    for leaver in (3, 2):
        for _ in range(10):
            for number in range(leaver + 1):
                world.poll(number)
            world.ranks[leaver].at_safe_point(at_rest=True)  # Only it is ready.
            world.pass_time(0.01)
        assert world.ranks[leaver].member._ready
        world.ranks[leaver].member.leaving = "its time is up"
        world.poll(leaver)
    assert world.ranks[1].member._round >= FINAL
    world.run_to_the_end()
    assert values(world) == [1.5, 1.5, 3.0, 4.0]
    assert [rank.member.apart for rank in world.ranks] == [None] * 4


def test_the_host_of_the_store_stays_until_the_others_have_ended():
    world = World(2)
    one_round(world)
    world.abort(0, 1)
    for _ in range(100):
        world.poll(0)
        if world.ranks[0].member.state is MemberState.STOPPED:
            break
        world.poll(1)
        for rank in world.ranks:
            rank.at_safe_point(at_rest=True)
        world.pass_time(0.01)
    assert world.ranks[0].member.state is MemberState.STOPPED
    assert not world.ranks[0].member.over
    world.run(6)
    assert world.ranks[0].member.over
    assert world.ranks[1].member.state is MemberState.STOPPED


# Sessions that come after another one.


def test_a_rank_that_died_is_not_waited_for_in_the_next_session():
    world = World(3, continue_alone=True)
    one_round(world)
    world.kill(2)
    world.run(30, seconds_per_turn=1.0)
    world.run_to_the_end()
    after = World(3, continue_alone=True, after=world)
    one_round(after)
    assert [rank.member.progress.members for rank in after.living()] == [(0, 1), (0, 1)]
    after.run_to_the_end()
    assert [rank.member.state for rank in after.living()] == [MemberState.STOPPED, MemberState.STOPPED]


def test_a_rank_that_never_came_is_lost_for_all_members_of_the_session():
    world = World(3)
    world.kill(2)
    for _ in range(2 * int(PATIENCE.join_s)):
        world.run(1, seconds_per_turn=1.0)
    for rank in world.living():
        assert isinstance(rank.member.error, PeerLostError)
        assert rank.member.error.peers == (2,)


@pytest.mark.parametrize("when", ["as it leaves", "later", "never"])
def test_a_rank_that_left_is_waited_for_in_the_next_session_unless_that_was_for_good(when):
    world = World(3)
    one_round(world)
    member = world.ranks[2].member
    member.for_good, member.leaving = when == "as it leaves", "its process ends"
    world.run_to_the_end()
    if when == "later":
        member.sign_off()
    after = World(3, after=world)
    after.dead.add(2)
    one_round(after)
    rounds = 0 if when == "never" else 1
    assert [rank.member.progress.rounds for rank in after.living()] == [rounds, rounds]
    assert all(rank.member.error is None for rank in after.living())


# Warm-up, in which ranks wait for each other in each step.


def test_ranks_that_stop_after_equally_many_steps_of_warm_up_part_in_peace():
    world = World(2, warming=True)
    for rank in world.ranks:
        rank.member.begun = 5
    world.abort(0)
    world.run(10)
    world.run_to_the_end()
    assert {rank.member.state for rank in world.ranks} == {MemberState.STOPPED}
    assert [rank.stranded for rank in world.ranks] == ["", ""]
    assert not world.wires


def test_a_rank_that_stops_in_warm_up_releases_those_who_wait_for_it_in_a_step():
    world = World(2, warming=True)
    world.ranks[0].member.begun, world.ranks[1].member.begun = 5, 6
    world.abort(0)
    world.run(3)
    assert "rank 0 called abort() after 5 steps, in warm-up" in world.ranks[0].stranded
    assert not world.ranks[1].stranded


def test_a_rank_that_leaves_in_warm_up_is_named():
    world = World(2, warming=True)
    world.run(2)
    world.ranks[1].member.leaving = "its process ends"
    world.run(3)
    error = world.ranks[0].member.error
    assert isinstance(error, PeerLostError)
    assert error.peers == (1,)
    assert "rank 1 left during warm-up" in str(error)
    assert "its process ends" in str(error)
    assert world.ranks[1].stranded


@pytest.mark.parametrize("dies", [True, False])
def test_a_rank_that_goes_after_warm_up_does_no_harm_to_one_that_is_about_to_end_it(dies):
    world = World(2, warming=True, continue_alone=True)
    for rank in world.ranks:
        rank.member.begun = 5
    world.ranks[0].member.warming = False  # Rank 1 evaluates after the last step of warm-up.
    world.run(3)
    if dies:
        world.kill(0)
    else:
        world.ranks[0].member.leaving = "its process ends"
    world.run(30, seconds_per_turn=1.0)
    assert world.ranks[1].member._view.gone(0)
    assert world.ranks[1].member.error is None
    assert not world.ranks[1].member.over


def test_a_rank_that_will_never_come_is_missed_in_warm_up():
    world = World(2, warming=True)
    world.dead.add(0)
    world.ranks[1].member._view._departures.note({0: "its process ends"})
    world.run(3)
    assert "rank 0 left during warm-up" in str(world.ranks[1].member.error)


def test_decisions_do_not_pile_up_in_the_store():
    world = World(2)
    for _ in range(20):
        one_round(world)
    world.run(5)
    present = [number for number in range(25) if world.store.check([f"decision/{number}/all"])]
    assert len(present) <= 2
