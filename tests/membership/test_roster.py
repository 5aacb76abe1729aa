"""What one process knows of the others, and what members give to a newcomer."""

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from bagua.algorithms import Algorithm
from bagua.comm import Cells, Fetch, PhaseDeadline, decode, encoded_later
from bagua.compression import Float16
from bagua.errors import CollectiveTimeoutError, ConfigurationError, PeerLostError
from bagua.membership import participant
from bagua.membership.counterparts import Counterparts, Donor, Receiver
from bagua.membership.epochs import Epoch, Standing, StopReport
from bagua.membership.island import Island
from bagua.membership.state import Deadlines, MemberState, Offer, Roster, SeatRecord, record_name, seat_name
from tests.membership.training import PERIOD, among, joined, new_store, train, wrapped

DEADLINES = Deadlines(beat_s=0.25, silence_s=3.0, suspect_s=0.6)


def roster_of_two() -> tuple[Roster, Cells]:
    """As seat 0 sees itself and seat 1, whose connections have refused it in epoch 1, and not in epoch 2."""
    cells = Cells(new_store())
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
    cells, times = Cells(new_store()), itertools.count(0.0, 0.25)
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
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda seconds: None)
    monkeypatch.setattr(participant, "time", clock)
    met: list[Epoch] = []
    store = new_store()
    cells = Cells(store)
    for seat in range(2):  # Seat 1 lives, and never comes to its exchange.
        cells.claim(seat_name(seat), str(seat))
    state = MemberState(cells, 0, dataclasses.replace(DEADLINES, timeout_s=15.0), clock=lambda: 0.0)
    counterparts = Counterparts(state, store, "threads", met.append)
    one = participant.Participant(state, Island(None, counterparts.acts), counterparts, size=2, minimum=1)
    state.standing = Standing(0, Epoch(1, (0, 1))).stop()
    assert state.standing.report == StopReport(1)
    one._change()
    counterparts.close()
    assert [epoch.members for epoch in met] == [(0,)]
    assert "it did not come to its next exchange within 15 s" in met[0].why


class Given:
    """The state of a rank, as far as those who give and receive it ask."""

    seat, at, record = 9, (3, 17), SeatRecord()

    def __init__(self, parts: dict | None = None, timeout_s: float = 60.0) -> None:
        self.parts, self.deadlines = parts, Deadlines(beat_s=0.004, timeout_s=timeout_s)

    def give(self) -> dict | None:
        return self.parts

    def take(self, parts: dict, step: int) -> None:
        assert step == -1
        self.parts = parts

    def tell(self, offer: Offer | None) -> None:
        self.record = SeatRecord.from_json(json.loads(json.dumps(SeatRecord(offer=offer).to_json())))


@pytest.fixture
def giving() -> Iterator[Callable[..., list[Donor]]]:
    """Makes members that offer these states after exchange 3, in epoch 2."""
    made: list[Donor] = []

    def give(*states: dict) -> list[Donor]:
        made.extend(Donor(Given(parts)) for parts in states)
        for donor in made:
            donor.offer([3, 2])
        return made

    yield give
    for donor in made:
        donor.close()


class Receiving(Receiver):
    """A newcomer that is told what members offer."""

    def fetch(self, look, needs: int = 0) -> None:
        self._offers = lambda seats: look()
        self.receive_early([], needs, lambda: None)

    def taken(self) -> dict | None:
        self.take(-1)
        return self._state.parts


def offers(*made: Donor) -> dict[int, Offer | None]:
    """What the store says of them, by seat."""
    return {seat: donor._state.record.offer for seat, donor in enumerate(made)}


def test_a_newcomer_has_what_members_offer_and_is_told_where_they_are(giving) -> None:
    state = {"model": {"weights": torch.arange(3.0)}, "optimizers": [1]}
    made, receiver = giving(state, state), Receiving(Given())
    receiver.fetch(lambda: offers(*made))
    assert (receiver.exchange, receiver.latest_step()) == (3, 17)
    made[0]._state.parts = {"model": {"weights": torch.ones(3)}, "optimizers": [2]}
    made[0].offer([4, 2])
    receiver.fetch(lambda: offers(*made), needs=4)
    assert (receiver.exchange, receiver.latest_step()) == (4, -1)
    found = receiver.taken()
    assert found["optimizers"] == [1]
    torch.testing.assert_close(found["model"], {"weights": torch.ones(3)})


def test_a_member_that_cannot_send_its_state_is_passed_over(giving) -> None:
    made, receiver = giving({"model": len}, {"model": 5}), Receiving(Given())
    receiver.fetch(lambda: offers(*made))
    assert receiver.taken() == {"model": 5}


def test_members_that_cannot_send_their_state_end_the_newcomer_with_the_reason(giving) -> None:
    made = giving({"model": len}, {"model": len})
    with pytest.raises(ConfigurationError, match="members cannot send their state; seat 0: an object of this type"):
        Receiving(Given()).fetch(lambda: offers(*made))


def test_a_newcomer_without_members_that_have_the_state_says_so(giving) -> None:
    (made,), receiver = giving({"model": 5}), Receiving(Given())
    with pytest.raises(PeerLostError, match="all members that have the state are lost"):
        receiver.fetch(dict)
    stale = offers(made)
    made.withdraw()
    assert offers(made) == {0: None}
    with pytest.raises(PeerLostError, match="seat 0: it offers that no longer", check=lambda one: one.peers == (0,)):
        receiver.fetch(lambda: stale)
    with pytest.raises(CollectiveTimeoutError, match="no member has offered seat 9 the state"):
        Receiving(Given(timeout_s=0.0)).fetch(lambda: {0: None})


def test_a_store_that_does_not_answer_each_time_costs_no_source(giving) -> None:
    (made,), receiver, again = giving({"model": 5}), Receiving(Given()), threading.Event()
    server, looks = made._server._server, itertools.count()
    answer = server.answer
    server.answer = lambda question: answer(question) if again.wait(60) else None

    def look() -> dict[int, Offer | None]:
        if next(looks) > 1:
            again.set()
        return {0: None} if again.is_set() else offers(made)

    receiver.fetch(look)
    assert receiver.taken() == {"model": 5}


def offered_by(islands):
    """The parts of the state that a member offers, as a newcomer gets them."""
    source = islands._state.record.offer.source
    _, contents = Fetch({}, frozenset(), PhaseDeadline(60.0)).run(lambda: [source])
    return {name: decode(torch.frombuffer(content, dtype=torch.uint8)) for name, content in contents.items()}


@pytest.mark.threads
def test_a_state_is_copied_while_training_goes_on_and_before_an_exchange_changes_it(monkeypatch):
    """The copy is held up until the exchange asks for it; if it did not ask, it would be that of the next anchor."""
    asked = threading.Event()

    def held_up(part):
        memory, copy = encoded_later(part)
        late = isinstance(part, dict) and "buckets" in part
        return memory, (lambda: asked.wait(60) and copy()) if late else copy

    monkeypatch.setattr("bagua.comm.encoded_later", held_up)
    with joined(new_store(), 1) as islands:
        model = wrapped(islands, "diloco")
        train(islands, model, PERIOD)
        anchor = model.bagua_state_dict()["parameters"]["weight"]["anchor"]
        weights, donor = model.weight.detach().clone(), islands._counterparts.donor
        donor.offer([1, 1])
        settle = donor.settle
        donor.settle = lambda: (asked.set(), settle())
        train(islands, model, 2 * PERIOD)
        asked.set()
        given = offered_by(islands)
        assert not torch.equal(model.bagua_state_dict()["parameters"]["weight"]["anchor"], anchor)
    assert torch.equal(given["engine"]["parameters"]["weight"]["anchor"], anchor)
    assert torch.equal(given["tensors"]["weight"], weights)


@pytest.mark.threads
def test_what_the_codec_of_one_island_has_lost_stays_there():
    algorithm = Algorithm.init("diloco", sync_every=PERIOD, codec=Float16(), error_feedback=True)

    def island(islands):
        model = wrapped(islands, algorithm)
        train(islands, model, PERIOD)
        assert model.bagua_state_dict()["rank0"]["parameters"]["weight"]["residual"].any()
        islands._counterparts.donor.offer([1, 1])
        return offered_by(islands)["engine"]

    for engine in among(2, island):
        assert engine["rank0"] == {"parameters": {}, "others": [], "flights": []}
        assert set(engine["parameters"]["weight"]) == {"anchor", "outer.momentum_buffer"}
