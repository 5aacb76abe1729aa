"""The rule for the next epoch, and every order of events in which members die, stop, wake, are suspected, or come."""

from __future__ import annotations

import os

import pytest

from bagua.membership.epochs import Epoch, Standing, StopReport, first_epoch, next_epoch
from tests.membership.simulation import Rules, UnfinishedError, ViolationError, explore

#: members, exchanges, faults, processes that come later; and whether these receive the state before they come in.
QUICK = [(2, 2, 2, 0), (3, 1, 1, 0), (3, 2, 1, 0), (2, 2, 1, 1, False), (2, 1, 0, 1), (1, 2, 1, 1)]
THOROUGH = [
    *((3, 1, 2, 0), (2, 2, 2, 1, False), (3, 2, 1, 1, False), (2, 3, 1, 1, False), (4, 1, 1, 0)),
    *((1, 2, 1, 2, False), (2, 1, 1, 1), (2, 2, 1, 1), (1, 1, 1, 2), (1, 3, 1, 1)),
]
SIZES = QUICK + (THOROUGH if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else [])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_order_of_events_lets_histories_differ_or_members_wait_for_ever(size):
    members, exchanges, faults, comers, *early = size
    assert explore(Rules(members, exchanges, faults, comers, early=not early)) > 500


@pytest.mark.parametrize("ranks", [1, 2] if len(SIZES) > len(QUICK) else [1])
def test_without_the_barrier_there_is_an_order_in_which_histories_differ(ranks):
    with pytest.raises(ViolationError, match=r"exchange 1: seat . has epoch"):
        explore(Rules(3, 1, 1, barrier=False, ranks=ranks))


#: members, exchanges, faults, islands that come later; each of two ranks.
OF_TWO_RANKS = [(2, 2, 1, 0)]
THOROUGH_OF_TWO_RANKS = [(2, 1, 2, 0), (3, 1, 1, 0), (2, 2, 2, 0), (2, 2, 1, 1), (3, 2, 1, 0)]
SIZES_OF_TWO_RANKS = OF_TWO_RANKS + (THOROUGH_OF_TWO_RANKS if len(SIZES) > len(QUICK) else [])


@pytest.mark.parametrize("size", SIZES_OF_TWO_RANKS, ids=str)
def test_no_order_of_events_lets_the_ranks_of_an_island_differ(size):
    assert explore(Rules(*size, ranks=2)) > 500


def test_an_island_that_holds_what_its_first_rank_holds_is_found_wrong():
    with pytest.raises(ViolationError, match="takes in a result that some of its ranks do not have"):
        explore(Rules(2, 1, 1, ranks=2, together=False))


def test_a_newcomer_that_comes_in_with_an_older_state_is_found_wrong():
    with pytest.raises(ViolationError, match="seat 1 has a state of 0 exchanges"):
        explore(Rules(1, 2, 0, 1, stale=True))


@pytest.mark.parametrize("base", [max, lambda held: min(held) - 1], ids=["too high", "too low"])
def test_another_base_is_found_wrong(base, monkeypatch):
    def other(epoch, reports, *rest, **more):
        proposal = next_epoch(epoch, reports, *rest, **more)
        if isinstance(proposal, str):
            return proposal
        return proposal._replace(base=max(0, base([reports[seat].held for seat in proposal.donors])))

    monkeypatch.setattr("tests.membership.simulation.next_epoch", other)
    with pytest.raises((ViolationError, AssertionError)):
        explore(Rules(3, 2, 1))


#: As above, through a bucket, and whether an attempt may fail although nobody is gone; then nobody misses a result.
IN_A_BUCKET = [(2, 2, 1, 0, True), (3, 1, 1, 0, False), (2, 1, 0, 1, True)]
THOROUGH_IN_A_BUCKET = [
    *((2, 2, 2, 0, True), (2, 2, 2, 0, False), (3, 1, 1, 0, True), (3, 2, 1, 0, True), (3, 2, 1, 0, False)),
    *((2, 1, 1, 1, True), (3, 1, 2, 0, False)),
]
SIZES_IN_A_BUCKET = IN_A_BUCKET + (THOROUGH_IN_A_BUCKET if len(SIZES) > len(QUICK) else [])


@pytest.mark.parametrize("size", SIZES_IN_A_BUCKET, ids=str)
def test_no_order_of_puts_gets_and_claims_lets_members_apply_different_lists(size):
    *counts, cuts = size
    assert explore(Rules(*counts, bucket=True, cuts=cuts)) > 500


def test_the_ranks_of_an_island_apply_one_list_of_a_bucket():
    assert explore(Rules(2, 1, 1, bucket=True, ranks=2)) > 500


def test_who_stops_without_asking_the_cell_is_found_wrong():
    with pytest.raises(ViolationError, match=r"seat . has applied 1, and 0 counts"):
        explore(Rules(2, 1, 1, bucket=True, asks=False))


def test_worlds_that_are_not_run_through_are_no_success():
    with pytest.raises(UnfinishedError, match=r"1.. worlds are found"):
        explore(Rules(2, 2, 2), most=100)


EPOCH = Epoch(3, (0, 2, 5, 6), base=7)
GONE = {5: "it died", 6: "it died"}


def reports(**held: int) -> dict[int, StopReport]:
    return {int(seat[1:]): StopReport(3, number) for seat, number in held.items()}


def test_everybody_who_is_not_gone_is_waited_for():
    assert next_epoch(EPOCH, reports(s0=8, s2=7), {5: "it died"}) == "waiting for seat 6"


def test_results_that_all_hold_count():
    after = next_epoch(EPOCH, reports(s0=8, s2=7, s6=8), {5: "it died"})
    assert after == Epoch(4, (0, 2, 6), 7, (), "seat 5 is not in it: it died")


def test_half_is_not_more_than_half():
    answer = next_epoch(EPOCH, reports(s0=8, s2=8), GONE)
    assert answer == "seats 0, 2 are not more than half of seats 0, 2, 5, 6 (seat 5: it died; seat 6: it died)"


def test_those_who_said_goodbye_are_missed_by_nobody():
    after = next_epoch(EPOCH, reports(s0=8, s2=8), GONE, left={6})
    assert after.members == (0, 2)


@pytest.mark.parametrize(
    ("minimum", "waiting", "members"),
    [(2, [], (0, 2)), (3, [], None), (3, [9], (0, 2)), (4, [9], None), (5, [8, 9], None)],
)
def test_a_minimum_counts_those_who_wait(minimum, waiting, members):
    after = next_epoch(EPOCH, reports(s0=8, s2=8), GONE, waiting, minimum)
    assert (after.members if members else None) == members if members else isinstance(after, str)


def test_newcomers_come_in_when_all_rest():
    resting = {seat: report._replace(resting=True) for seat, report in reports(s0=8, s2=8, s5=8, s6=8).items()}
    after = next_epoch(EPOCH, resting, {}, [9, 7])
    assert (after.members, after.newcomers, after.donors) == ((0, 2, 5, 6, 7, 9), (7, 9), (0, 2, 5, 6))
    resting[2] = resting[2]._replace(resting=False)
    assert next_epoch(EPOCH, resting, {}, [9, 7]).newcomers == ()


@pytest.mark.parametrize("resting", [True, False])
def test_who_has_the_state_comes_in_with_any_change(resting):
    said = {seat: report._replace(resting=resting) for seat, report in reports(s0=8, s2=8, s5=9, s6=8).items()}
    after = next_epoch(EPOCH, said, {}, ready={7: 8, 8: 7, 9: -1})
    assert (after.members, after.newcomers, after.base, after.why) == ((0, 2, 5, 6, 7), (), 8, "seat 7 came")


def test_who_has_no_state_has_no_say():
    epoch = Epoch(1, (0, 1, 2), newcomers=(1, 2))
    without = {seat: StopReport(1, complete=False) for seat in (1, 2)}
    assert next_epoch(epoch, without, {0: "it died"}).startswith("no member that is left has the state")
    after = next_epoch(epoch, {0: StopReport(1, resting=True), **without}, {}, [1, 2])
    assert (after.members, after.newcomers) == ((0, 1, 2), (1, 2))


@pytest.mark.parametrize(("number", "held", "goes_on"), [(1, 0, False), (4, 7, True), (4, 8, False)])
def test_newcomers_that_are_lost_before_they_had_the_state_are_not_missed(number, held, goes_on):
    epoch = Epoch(number, (0, 1, 2), 0 if number == 1 else 7, newcomers=(1, 2))
    after = next_epoch(epoch, {0: StopReport(number, held)}, dict.fromkeys((1, 2), "it died"))
    assert isinstance(after, Epoch) is goes_on


def test_a_newcomer_that_told_of_the_state_before_it_died_is_missed():
    epoch = Epoch(4, (0, 1, 2), 7, newcomers=(1, 2))
    said = {seat: StopReport(4, 7) for seat in (0, 1)}
    after = next_epoch(epoch, said, dict.fromkeys((1, 2), "it died"))
    assert str(after).startswith("seat 0 are not more than half of seats 0, 1")


def test_the_first_epoch_has_one_donor():
    assert first_epoch([4, 1, 2])[:4] == (1, (1, 2, 4), 0, (2, 4))


def test_a_standing_refuses_what_the_protocol_forbids():
    begun = Standing(0, EPOCH, 7, 7, 7).enter()
    with pytest.raises(AssertionError):
        begun.enter()
    with pytest.raises(AssertionError):
        begun.apply()
    applied = begun.hold().apply()
    with pytest.raises(AssertionError):
        applied.stop().follow(Epoch(4, (0,), base=7))
    with pytest.raises(AssertionError):
        begun.stop().follow(Epoch(4, (2,), base=7))
