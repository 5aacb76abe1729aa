"""What one process knows of the others, and what it gives to a newcomer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from types import SimpleNamespace

import pytest
import torch

from bagua.comm import Cells
from bagua.comm.store.serving import thread_store
from bagua.errors import CollectiveTimeoutError, ConfigurationError, PeerLostError
from bagua.membership import participant
from bagua.membership.counterparts import Counterparts
from bagua.membership.epochs import Epoch, Standing, StopReport
from bagua.membership.island import Island
from bagua.membership.participant import Participant
from bagua.membership.state import Deadlines, MemberState, Roster, SeatRecord, record_name, seat_name
from bagua.membership.transfer import Donor, Offer, Receiver

DEADLINES = Deadlines(beat_s=0.25, silence_s=3.0, suspect_s=0.6)


def roster_of_two() -> tuple[Roster, Cells]:
    """As seat 0 sees itself and seat 1, whose connections have refused it in epoch 1, and not in epoch 2."""
    cells = Cells(thread_store())
    for seat in range(2):
        cells.claim(seat_name(seat), str(seat))
        report = None if seat else StopReport(1, lost=(1,))
        cells.post(record_name(seat), SeatRecord(beat=1, report=report).to_json())
    return Roster(cells, 0, DEADLINES), cells


@pytest.mark.parametrize("slept_s", [0.0, 0.7, 60.0])
def test_others_have_time_to_wake_after_this_process_has_slept(slept_s: float) -> None:
    roster, cells = roster_of_two()
    roster.look(0.0)
    roster.look(slept_s)  # The first that wakes. Seat 1 gives a sign of life within a beat, which is seen a beat later.
    roster.look(slept_s + 0.25)
    assert roster.gone(1) == {}
    cells.post(record_name(1), SeatRecord(beat=2).to_json())
    roster.look(slept_s + 0.5)
    assert roster.gone(1) == {}
    for _ in range(3):
        slept_s += 0.25
        roster.look(slept_s + 0.5)
    assert 1 in roster.gone(1)
    assert 1 not in roster.gone(2)


def test_who_is_silent_is_found_although_looks_are_rare() -> None:
    roster, _ = roster_of_two()
    for number in range(20):
        roster.look(2.0 * number)
    assert list(roster.gone(2)) == [1]


def test_where_signs_of_life_come_late_silence_may_last_longer() -> None:
    roster, cells = roster_of_two()
    beat = 1
    for number in range(130):
        beat += number % 8 == 0  # Each eighth look, so after two seconds.
        cells.post(record_name(1), SeatRecord(beat=beat).to_json())
        roster.look(number * 0.25)
        assert roster.gone(1) == {} or beat < 10
    for number in range(130, 160):
        roster.look(number * 0.25)
        silent_s = 0.25 * (number - 128)
        assert (1 in roster.gone(2)) is (silent_s > 6.0)  # 3 times the first ones.
        assert (1 in roster.gone(1)) is (silent_s > 2.0)


def test_a_rank_that_is_silent_is_lost_and_one_that_said_goodbye_is_not() -> None:
    cells, times = Cells(thread_store()), itertools.count(0.0, 0.25)
    state = MemberState(cells, 7, DEADLINES, (0, 3), lambda: next(times))
    for number in range(20):
        cells.post(record_name(7, 1), SeatRecord(beat=min(number, 5)).to_json())
        cells.post(record_name(7, 2), SeatRecord(beat=1, left="it left").to_json())
        state.tell()
        state.look()
        assert number > 15 or not state.lost_ranks()
    assert list(state.lost_ranks()) == [1]
    assert "it was silent for" in state.lost_ranks()[1]


def test_a_member_that_does_not_come_is_left_out_however_long_one_look_takes(monkeypatch) -> None:
    """Each look takes longer than the pause between two: the last one must still count as late."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(
        participant, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds: None)
    )
    met: list[Epoch] = []
    store = thread_store()
    cells = Cells(store)
    for seat in range(2):  # Seat 1 lives, and never comes to its exchange.
        cells.claim(seat_name(seat), str(seat))
    state = MemberState(cells, 0, dataclasses.replace(DEADLINES, timeout_s=15.0), clock=lambda: 0.0)
    counterparts = Counterparts(state, store, "threads", met.append)
    one = Participant(state, Island(None, counterparts.acts), counterparts, size=2, minimum=1)
    state.standing = Standing(0, Epoch(1, (0, 1))).stop()
    assert state.standing.report == StopReport(1)
    one._change()
    counterparts.close()
    assert [epoch.members for epoch in met] == [(0,)]
    assert "it did not come to its next exchange within 15 s" in met[0].why


def donors(*states: dict) -> list[Donor]:
    """Members that offer their states after exchange 3, in epoch 2."""
    made = [Donor(lambda: [3, 17]) for _ in states]
    for donor, state in zip(made, states, strict=True):
        donor.offer(state, 3, 2)
    return made


def offers(*made: Donor) -> dict[int, Offer | None]:
    """What the store says of them, by seat."""
    return {seat: Offer.from_json(json.loads(json.dumps(donor.offered))) for seat, donor in enumerate(made)}


def close(*made: Donor) -> None:
    for donor in made:
        donor.close()


def test_a_newcomer_has_what_members_offer_and_is_told_where_they_are() -> None:
    state = {"model": {"weights": torch.arange(3.0)}, "optimizers": [1]}
    made, receiver = donors(state, state), Receiver(9, 60.0, 0.001)
    receiver.receive(lambda: offers(*made))
    assert (receiver.exchange, receiver.latest_step()) == (3, 17)
    assert sum(receiver.received_bytes.values()) > 0
    made[0].offer({"model": {"weights": torch.ones(3)}, "optimizers": [2]}, 4, 2)
    receiver.receive(lambda: offers(made[0]), frozenset({"optimizers"}))
    assert (receiver.exchange, receiver.latest_step()) == (4, -1)
    found = receiver.take()
    assert found["optimizers"] == [1]
    torch.testing.assert_close(found["model"], {"weights": torch.ones(3)})
    close(*made)


def test_a_member_that_cannot_send_its_state_is_passed_over() -> None:
    made, receiver = donors({"model": len}, {"model": 5}), Receiver(9, 60.0, 0.001)
    receiver.receive(lambda: offers(*made))
    assert receiver.take() == {"model": 5}
    close(*made)


def test_members_that_cannot_send_their_state_end_the_newcomer_with_the_reason() -> None:
    made, receiver = donors({"model": len}, {"model": len}), Receiver(9, 60.0, 0.001)
    with pytest.raises(ConfigurationError, match="members cannot send their state; seat 0: an object of this type"):
        receiver.receive(lambda: offers(*made))
    close(*made)


def test_a_newcomer_without_members_that_have_the_state_says_so() -> None:
    made, receiver = donors({"model": 5}), Receiver(9, 60.0, 0.001)
    with pytest.raises(PeerLostError, match="all members that have the state are lost"):
        receiver.receive(dict)
    stale = offers(*made)
    made[0].withdraw()
    with pytest.raises(PeerLostError, match="seat 0: it offers that no longer") as caught:
        receiver.receive(lambda: stale)
    assert caught.value.peers == (0,)
    with pytest.raises(CollectiveTimeoutError, match="no member has offered seat 9 the state"):
        Receiver(9, 0.0, 0.001).receive(lambda: {0: None})
    close(*made)


def test_a_store_that_does_not_answer_each_time_costs_no_source() -> None:
    made, receiver, again = donors({"model": 5}), Receiver(9, 60.0, 0.001), threading.Event()
    server = made[0]._server._server
    answer, looks = server.answer, itertools.count()
    server.answer = lambda question: answer(question) if again.wait(60) else None

    def look() -> dict[int, Offer | None]:
        if next(looks) > 1:
            again.set()
        return {0: None} if again.is_set() else offers(*made)

    receiver.receive(look)
    assert receiver.take() == {"model": 5}
    close(*made)
