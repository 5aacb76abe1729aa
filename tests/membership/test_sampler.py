"""What islands that come and go draw from a data set: each sample once, and again what a lost island had drawn."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bagua.algorithms import Algorithm
from bagua.errors import ConfigurationError
from bagua.membership import ElasticSampler
from tests.membership.training import PERIOD, among, joined, learn, new_store, run_numbered, survivors, vanish, wrapped


def new_sampler(seat, samples, *, rank=0, ranks=1, size=1, **options):
    islands = SimpleNamespace(seat=seat, place=(rank, ranks), size=size, deal_out=lambda sampler: None)
    return ElasticSampler(range(samples), islands, **options)


class Crowd:
    """Members that exchange, and what they have drawn and trained on; told by their indices, and nothing else."""

    def __init__(self, samples, founders):
        self.samples, self.founders = samples, founders
        self.passes, self.members, self.here = {}, {}, {}
        #: Indices that count; those since the last exchange, by seat; and those that only loaders of lost ones had.
        self.trained, self.pending, self.lost = Counter(), {}, Counter()
        self.taken = self.repeats = self.ahead = 0
        for seat in range(founders):
            self._come(seat)

    def _come(self, seat, state=None):
        sampler = new_sampler(seat, self.samples, size=self.founders)
        if state is not None:
            sampler.take(state)
        sampler.begin()
        self.members[seat], self.here[seat], self.pending[seat] = sampler, [], Counter()
        self.passes[seat] = iter(sampler)
        self.taken = max(self.taken, seat + 1)

    def train(self, seat, samples, ahead):
        """Train on some; a loader draws some more ahead."""
        sampler, drawn = self.members[seat], self.here[seat]
        while len(drawn) < samples + ahead:
            index = next(self.passes[seat], None)
            if index is None:
                self.passes[seat] = iter(sampler)
                drawn.clear()  # A loader that is begun anew forgets what it had loaded.
            else:
                drawn.append(index)
        sampler.record(samples)
        self.pending[seat].update(drawn[:samples])
        del drawn[:samples]

    def exchange(self, lost, waiting):
        """One exchange, before which some are lost, and after which some come."""
        uncounted = []
        for seat in lost:
            if len(self.members) > 1 and seat in self.members:
                gone = self.members.pop(seat)
                self.lost.update(gone._index(number) for number in gone._own)
                if seat in gone._lanes:  # Nothing of a newcomer has counted.
                    self.repeats += self.pending[seat].total()
                    self.trained += self.pending[seat]
                    uncounted += map(gone._number, range(gone._drawn))
        said = {seat: sampler.said() for seat, sampler in self.members.items()}
        for seat, sampler in self.members.items():
            if seat not in sampler._lanes:
                self.repeats += said[seat]
            sampler.hear(said)
        for seat, sampler in self.members.items():
            sampler.settle()
            self.trained += self.pending[seat]
            self.pending[seat] = Counter()
        positions = [sampler.give() for sampler in self.members.values()]
        self.ahead += sum(number >= positions[0]["first"] for number in uncounted)
        assert all(position == positions[0] for position in positions)
        for seat in range(self.taken, self.taken + waiting):
            self._come(seat, positions[0])


#: Seats that train, on how many samples, and how many they draw ahead; seats that are lost; newcomers.
event = st.tuples(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 5)), max_size=4),
    st.sets(st.integers(0, 5), max_size=2),
    st.integers(0, 2),
)


@pytest.mark.parametrize("calm", [True, False])
@given(founders=st.integers(1, 3), events=st.lists(event, max_size=8))
def test_what_is_trained_on_twice_is_told_and_nothing_else_is(calm, founders, events):
    """At most what lost islands had drawn since their last exchange, and newcomers before their first.

    Nobody knows of what a lost island had drawn when it was further than all others. In calm, where no island is lost
    or comes, every sample is drawn once.
    """
    crowd = Crowd(7, founders)
    for trained, lost, waiting in events:
        for seat, count, ahead in trained:
            if seat in crowd.members:
                crowd.train(seat, count, ahead)
        crowd.exchange(*((), 0) if calm else (lost, waiting))
    if not calm:  # Newcomers of the last exchange take part in another one.
        crowd.exchange((), 0)
    sampler = next(iter(crowd.members.values()))
    position = sampler.give()
    expected = Counter(map(sampler._index, {*range(position["first"])} - {*position["left"]}))
    waiting = Counter(one._index(number) for one in crowd.members.values() for number in one._own)
    if calm:
        assert (crowd.trained + waiting, sampler.again) == (expected, 0)
    twice = (crowd.trained - expected).total()
    assert twice <= crowd.repeats
    assert twice <= sampler.again + crowd.ahead
    assert not expected - crowd.trained - waiting - crowd.lost  # Only what loaders of lost ones had is left out.


def test_who_drew_more_gets_more_lanes():
    sampler = new_sampler(0, 10**6, size=3)
    sampler.begin()
    sampler.hear({0: 240, 1: 240, 2: 80})
    sampler.settle()
    lanes = sampler.give()["lanes"]
    assert Counter(lanes) == {0: 8, 1: 8, 2: 3}
    assert lanes[:5] == [0, 1, 2, 0, 1]
    assert len(sampler.give()["left"]) == 159  # What the third one had not drawn, up to the cursor.
    sampler.hear({0: 240, 1: 240, 2: 80})
    assert len(sampler._proposed["left"]) == 10


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_pass_has_all_samples_over_all_ranks(shuffle):
    members = [new_sampler(0, 11, rank=rank, ranks=2, shuffle=shuffle) for rank in range(2)]
    for sampler in members:
        sampler.begin()
    passes = []
    for _ in range(2):
        assert [len(sampler) for sampler in members] == [6, 5]
        passes.append([list(sampler) for sampler in members])
        for sampler, drawn in zip(members, passes[-1], strict=True):
            sampler.record(len(drawn))
        assert sorted(passes[-1][0] + passes[-1][1]) == list(range(11))
    assert (passes[0] != passes[1]) == shuffle


def test_training_goes_on_at_the_last_exchange():
    sampler = new_sampler(0, 12, shuffle=False)
    sampler.begin()
    drawn = iter(sampler)
    assert [next(drawn) for _ in range(5)] == [0, 1, 2, 3, 4]
    sampler.record(3)
    sampler.hear({0: sampler.said()})
    sampler.settle()
    assert next(drawn) == 5
    again = new_sampler(7, 12, shuffle=False, size=8)
    again.load_state_dict(sampler.state_dict())
    assert (again._first, again._left) == (5, [3, 4])  # Those that were not trained on come first.
    again = new_sampler(0, 12, shuffle=False)
    again.load_state_dict(sampler.state_dict())
    again.begin()
    assert list(again) == [3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_what_cannot_be_gone_on_from_is_refused():
    sampler, other = new_sampler(0, 12), new_sampler(0, 13)
    with pytest.raises(ConfigurationError, match="this position cannot be gone on from"):
        other.load_state_dict(sampler.state_dict())
    state = sampler.state_dict()
    sampler.begin()
    with pytest.raises(ConfigurationError, match="one that comes after it"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda: next(iter(new_sampler(0, 5))), "no island has come in yet"),
        (lambda: new_sampler(0, 5).record(1), "no rank has got so many samples"),
        (lambda: new_sampler(0, 1, ranks=2), "some rank would have no samples"),
        (lambda: next(new_sampler(0, 5).batches(DataLoader(range(5)))), "these batches do not consist of"),
        (lambda: new_sampler(0, 5, shuffle=1), "argument shuffle"),
    ],
)
def test_bad_use_is_refused(act, why):
    with pytest.raises(ConfigurationError, match=why):
        act()


def test_a_sampler_comes_before_the_model_and_alone():
    for already in (lambda islands: ElasticSampler(range(9), islands), wrapped):
        with joined(new_store(), 1) as islands:
            already(islands)
            with pytest.raises(ConfigurationError, match="one sampler for each, made before with_bagua"):
                ElasticSampler(range(9), islands)


def test_workers_of_a_loader_draw_ahead_and_what_they_drew_is_trained_on_next():
    data = list(range(24))
    with joined(new_store(), 1) as islands:
        sampler = ElasticSampler(data, islands, shuffle=False)
        model = wrapped(islands, "local_sgd")
        loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=1, prefetch_factor=4)
        for number, batch in enumerate(sampler.batches(loader), start=1):
            learn(model, batch.float()[None])
            if number == PERIOD:
                break
        assert sampler.give()["first"] > 3 * PERIOD
        assert sampler.state_dict()["left"] == list(range(3 * PERIOD, sampler.give()["first"]))
        assert [int(batch[0]) for batch in sampler.batches(loader)] == list(range(3 * PERIOD, 24, 3))


@pytest.mark.threads
def test_what_an_island_that_died_had_not_contributed_is_trained_on_by_the_others():
    def island(islands):
        sampler = ElasticSampler(range(24), islands)
        model, trained = wrapped(islands, Algorithm.init("local_sgd", sync_every=PERIOD)), []
        for batch in sampler.batches(DataLoader(range(24), batch_size=2, sampler=sampler)):
            if islands.seat == 1 and model.bagua_step == PERIOD + 1:
                vanish(islands)
            trained += batch.tolist()
            learn(model, torch.ones(1, 3))
        return trained, sampler.again

    ends = survivors(among(3, island))
    assert len(ends) == 2
    trained = [index for trained, _ in ends for index in trained]
    missing = set(range(24)) - set(trained)
    assert len(trained) == len(set(trained))
    assert len(missing) == 2 * PERIOD  # What the one that died had contributed before.
    assert [again for _, again in ends] == [2 * PERIOD] * 2  # Its part of the period in which it died.


@pytest.mark.threads
@pytest.mark.parametrize("pace", ["equal", "own"])
def test_a_newcomer_draws_what_others_do_not_when_it_takes_part(pace):
    """Before that it repeats something, and all know how much."""
    settled = threading.Event()

    def island(store, number):
        late = number == 2
        assert not late or settled.wait(60)
        with joined(store, 2) as islands:
            sampler = ElasticSampler(range(10**5), islands, shuffle=False)
            model = wrapped(islands, Algorithm.init("local_sgd", sync_every=PERIOD, pace=pace))
            first, trained, drawn, contributed = [], [], iter(sampler), 0
            while contributed < 3:
                for _ in range(PERIOD - model.bagua_step % PERIOD):
                    mine = [next(drawn) for _ in range(1 + islands.seat)]  # Some draw more.
                    (trained if not late or 2 in islands.members().contributed else first).extend(mine)
                    sampler.record(len(mine))
                    learn(model, torch.ones(1, 3))
                    if model.bagua_step % PERIOD == 0:
                        break
                contributed += 2 in islands.members().contributed
                settled.set()
            return first, trained, sampler.give()

    ends = run_numbered(3, island, new_store())
    position = ends[0][2]
    assert all(other == position for *_, other in ends)
    first = [index for first, _, _ in ends for index in first]
    trained = [index for _, trained, _ in ends for index in trained]
    assert position["again"] == len(first) > 0
    assert len(trained) == len(set(trained))
    assert set(trained) == set(range(position["first"])) - set(position["left"])
