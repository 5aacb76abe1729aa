"""What one process knows of the others, and what it gives to a newcomer."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest
import torch

from bagua.comm import Cells, get_default_group
from bagua.comm.store.serving import thread_store
from bagua.errors import ConfigurationError
from bagua.membership import participant
from bagua.membership.counterparts import Counterparts
from bagua.membership.epochs import Epoch, Standing, StopReport
from bagua.membership.island import Island
from bagua.membership.participant import Participant
from bagua.membership.presence import Presence
from bagua.membership.roster import Deadlines, Roster, SeatRecord, record_name, seat_name
from bagua.membership.transfer import receive_state, send_state
from bagua.testing import ThreadRanks
from bagua.testing.ranks import this_rank

DEADLINES = Deadlines(beat_s=0.25, silence_s=3.0, suspect_s=0.6)


def roster_of_two() -> tuple[Roster, Cells]:
    """As seat 0 sees itself and seat 1."""
    cells = Cells(thread_store())
    for seat in range(2):
        cells.claim(seat_name(seat), str(seat))
        cells.post(record_name(seat), SeatRecord(beat=1).to_json())
    return Roster(cells, 0, DEADLINES), cells


@pytest.mark.parametrize("slept_s", [0.0, 0.7, 60.0])
def test_others_have_time_to_wake_after_this_process_has_slept(slept_s: float) -> None:
    roster, cells = roster_of_two()
    roster.look(0.0)
    roster.look(slept_s)  # The first that wakes. Seat 1 gives a sign of life within a beat, which is seen a beat later.
    roster.look(slept_s + 0.25)
    assert roster.gone(1, suspects=[1]) == {}
    cells.post(record_name(1), SeatRecord(beat=2).to_json())
    roster.look(slept_s + 0.5)
    assert roster.gone(1, suspects=[1]) == {}
    for _ in range(3):
        slept_s += 0.25
        roster.look(slept_s + 0.5)
    assert 1 in roster.gone(1, suspects=[1])
    assert 1 not in roster.gone(1)


def test_who_is_silent_is_found_although_looks_are_rare() -> None:
    roster, _ = roster_of_two()
    for number in range(20):
        roster.look(2.0 * number)
    assert list(roster.gone(1)) == [1]


def test_a_rank_that_is_silent_is_lost_and_one_that_said_goodbye_is_not() -> None:
    cells, island = Cells(thread_store()), Island(None)
    island.size = 3
    times = itertools.count(0.0, 0.25)
    presence = Presence(cells, 7, island, DEADLINES, lambda: next(times))
    for number in range(20):
        cells.post(record_name(7, 1), SeatRecord(beat=min(number, 5)).to_json())
        cells.post(record_name(7, 2), SeatRecord(beat=1, left="it left").to_json())
        presence.tell()
        presence.look()
        assert number > 15 or not presence.lost_ranks()
    assert list(presence.lost_ranks()) == [1]
    assert "it was silent for" in presence.lost_ranks()[1]


class Seated:
    """The presence of seat 0, as far as a participant asks it. Seat 1 lives, and never comes to its exchange."""

    seat, has_left, trouble = 0, False, ""

    def __init__(self) -> None:
        self.roster = SimpleNamespace(
            reports=lambda number: {}, gone=lambda number: {}, waiting=list, left=frozenset, alive=lambda: (0, 1)
        )

    def look(self) -> None:
        pass

    def tell(self, **news: object) -> None:
        pass


def test_a_member_that_does_not_come_is_left_out_however_long_one_look_takes(monkeypatch) -> None:
    """Each look takes longer than the pause between two: the last one must still count as late."""
    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(
        participant, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds: None)
    )
    met = []

    def connect(epoch: Epoch) -> SimpleNamespace:
        met.append(epoch)
        return SimpleNamespace(close=lambda: None)

    presence, cells, island = Seated(), Cells(thread_store()), Island(None)
    counterparts = Counterparts(presence, cells, connect, lambda epoch: None)
    island.acts = counterparts.acts
    one = Participant(presence, cells, island, counterparts, size=2, minimum=1, timeout_s=15.0, deadlines=DEADLINES)
    one.standing = Standing(0, Epoch(1, (0, 1))).stop()
    assert one.standing.report == StopReport(1)
    one._change()
    assert [epoch.members for epoch in met] == [(0,)]
    assert "it did not come to its next exchange within 15 s" in met[0].why


def give_what_cannot_be_sent() -> str:
    comm = get_default_group().global_communicator
    said = ""
    if this_rank.get().rank == 0:
        send_state({"weights": torch.ones(3), "hook": len}, comm, 1)
    else:
        try:
            receive_state(comm, 0)
        except ConfigurationError as error:
            said = str(error)
    comm.barrier()  # Both can go on.
    return said


def test_a_state_that_cannot_be_sent_ends_the_newcomer_and_not_the_donor(caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="bagua"):
        _, said = ThreadRanks(2).run(give_what_cannot_be_sent)
    assert "could not encode its object" in said
    assert "newcomers cannot come in, because the state cannot be sent" in caplog.text
