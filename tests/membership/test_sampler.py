"""What islands that come and go draw from a data set: no sample is lost, and none counts twice."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from bagua.algorithms import Algorithm
from bagua.errors import ConfigurationError
from bagua.membership import ElasticSampler
from bagua.membership.epochs import Epoch
from bagua.membership.position import Tally
from bagua.parallel import with_bagua
from tests.membership.training import PERIOD, joined, new_model, new_store, run, vanish, wrapped


class Place(SimpleNamespace):
    """What a sampler asks of its islands."""

    def deal_out(self, sampler):
        self.sampler = sampler


def new_sampler(seat, samples, *, rank=0, ranks=1, **options):
    return ElasticSampler(range(samples), Place(seat=seat, place=(rank, ranks)), **options)


class Crowd:
    """Members that exchange, and what they have trained on; told by their indices, and nothing else."""

    def __init__(self, samples, founders):
        self.samples = samples
        self.passes = {}
        self.done = Counter()
        self.members = {}
        self.here = {}
        self.taken = 0
        self.room = 0
        for seat in range(founders):
            self._come(seat, Epoch(1, tuple(range(founders)), newcomers=tuple(range(1, founders))))

    def _come(self, seat, epoch, state=None):
        sampler = new_sampler(seat, self.samples)
        if state is not None:
            sampler.take(state)
        sampler.begin(seat, epoch)
        self.members[seat] = sampler
        self.here[seat] = []
        self.passes[seat] = iter(sampler)
        self.taken = max(self.taken, seat + 1)

    def train(self, seat, samples, ahead):
        """Train on some; a loader draws some more ahead."""
        sampler = self.members[seat]
        drawn = self.here[seat]
        while len(drawn) - self.trained(seat) < samples + ahead:
            index = next(self.passes[seat], None)
            if index is None:
                self.passes[seat] = iter(sampler)
                del drawn[self.trained(seat) :]  # A loader that is begun anew forgets what it had loaded.
            else:
                drawn.append(index)
        sampler.record(samples)

    def trained(self, seat):
        return self.members[seat]._trained

    def exchange(self, lost, waiting):
        """One exchange, before which some are lost, and after which some come."""
        for seat in lost:
            if len(self.members) > 1 and seat in self.members:
                del self.members[seat]
        said = {seat: sampler.said() for seat, sampler in self.members.items()}
        for seat, sampler in self.members.items():
            count = said[seat].trained
            self.done.update(self.here[seat][:count])
            del self.here[seat][:count]
            sampler.hear(said, waiting)
            sampler.settle()
        positions = [sampler.give() for sampler in self.members.values()]
        assert all(position == positions[0] for position in positions)
        for seat, sampler in self.members.items():
            assert tuple(sampler._own) == positions[0]["own"][seat]
        comers = range(self.taken, self.taken + waiting)
        members = tuple(sorted([*self.members, *comers]))
        for seat in comers:
            self._come(seat, Epoch(2, members, newcomers=tuple(comers)), positions[0])


events = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 5)), max_size=4),
        st.sets(st.integers(0, 5), max_size=2),
        st.integers(0, 2),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(founders=st.integers(1, 3), events=events)
def test_in_each_pass_every_sample_counts_once_whoever_comes_and_goes(founders, events):
    samples = 7
    crowd = Crowd(samples, founders)
    for trained, lost, waiting in events:
        for seat, count, ahead in trained:
            if seat in crowd.members:
                crowd.train(seat, count, ahead)
        crowd.exchange(lost, waiting)
    # From here on nobody comes or goes, until all have ended the pass in which the last one is.
    passes = max(sampler.number_of_pass for sampler in crowd.members.values()) + 1
    while any(sampler.number_of_pass < passes for sampler in crowd.members.values()):
        for seat in crowd.members:
            crowd.train(seat, 1, 0)
        crowd.exchange((), 0)
    position = next(iter(crowd.members.values())).give()
    missing = {*position["left"], *(number for numbers in position["own"].values() for number in numbers)}
    assert min(missing, default=position["first"]) >= passes * samples
    orders = [
        torch.randperm(samples, generator=torch.Generator().manual_seed(turn)).tolist()
        for turn in range(position["first"] // samples + 1)
    ]
    counted = [divmod(number, samples) for number in range(position["first"]) if number not in missing]
    assert crowd.done == Counter(orders[turn][place] for turn, place in counted)


def test_a_loader_that_has_nothing_left_waits_until_members_have_agreed():
    """What one lane gave before the exchange another one gives after it."""
    sampler = new_sampler(0, 40, shuffle=False)
    sampler.begin(0, Epoch(1, (0, 1), newcomers=(1,)))
    drawn = iter(sampler)
    assert [next(drawn) for _ in range(2)] == [0, 2]
    sampler.record(1)
    own = sampler.said()
    assert own == Tally(0, 2, 1)
    found, reader = [], threading.Thread(target=lambda: found.extend(itertools.islice(drawn, 6)), daemon=True)
    reader.start()
    sampler.hear({0: own}, 0)
    sampler.settle()
    reader.join(60)
    assert found == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_pass_has_all_samples_over_all_ranks(shuffle):
    members = [new_sampler(0, 11, rank=rank, ranks=2, shuffle=shuffle) for rank in range(2)]
    for sampler in members:
        sampler.begin(0, Epoch(1, (0,)))
    passes = []
    for _ in range(2):
        assert [len(sampler) for sampler in members] == [6, 5]
        passes.append([list(sampler) for sampler in members])
        for sampler, drawn in zip(members, passes[-1], strict=True):
            sampler.record(len(drawn))
        assert sorted(passes[-1][0] + passes[-1][1]) == list(range(11))
    assert (passes[0] != passes[1]) == shuffle


def test_what_was_loaded_and_not_trained_on_is_given_out_again():
    sampler = new_sampler(0, 10, shuffle=False)
    sampler.begin(0, Epoch(1, (0,)))
    drawn = iter(sampler)
    assert [next(drawn) for _ in range(5)] == [0, 1, 2, 3, 4]
    sampler.record(2)
    assert list(sampler) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_training_goes_on_where_it_was_saved():
    members = [new_sampler(seat, 12, shuffle=False) for seat in range(2)]
    for sampler in members:
        sampler.begin(sampler._seat, Epoch(1, (0, 1)))
        drawn = iter(sampler)
        for _ in range(4):
            next(drawn)
        sampler.record(3)
    again = new_sampler(7, 12, shuffle=False)
    again.load_state_dict(members[1].state_dict())
    again.begin(7, Epoch(1, (7,)))
    assert list(again) == [0, 2, 4, 6, 7, 8, 9, 10, 11]  # The other one may not have exchanged what it trained on.


def test_what_cannot_be_gone_on_from_is_refused():
    sampler, other = new_sampler(0, 12), new_sampler(0, 13)
    with pytest.raises(ConfigurationError, match="this position cannot be gone on from"):
        other.load_state_dict(sampler.state_dict())
    state = sampler.state_dict()
    sampler.begin(0, Epoch(1, (0,)))
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
    with joined(new_store(), 1) as islands:
        ElasticSampler(range(9), islands)
        with pytest.raises(ConfigurationError, match="one sampler for each"):
            ElasticSampler(range(9), islands)
    with joined(new_store(), 1) as islands:
        wrapped(islands, "diloco")
        with pytest.raises(ConfigurationError, match="made before with_bagua"):
            ElasticSampler(range(9), islands)


def test_workers_of_a_loader_draw_ahead_and_only_what_was_trained_on_counts():
    data = list(range(24))
    with joined(new_store(), 1) as islands:
        sampler = ElasticSampler(data, islands, shuffle=False)
        model = wrapped(islands, "local_sgd")
        (optimizer,) = model.bagua_optimizers
        loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=1, prefetch_factor=4)
        for number, batch in enumerate(sampler.batches(loader), start=1):
            optimizer.zero_grad()
            model(batch.float()[None]).sum().backward()
            optimizer.step()
            if number == PERIOD:
                break
        assert sampler.give()["first"] > 3 * PERIOD
        assert sampler.state_dict()["left"] == list(range(3 * PERIOD, sampler.give()["first"]))
        assert [int(batch[0]) for batch in sampler.batches(loader)] == list(range(3 * PERIOD, 24, 3))


def train_on(sampler, model, before):
    """Train until the data is over; the samples that this island trained on."""
    (optimizer,) = model.bagua_optimizers
    trained = []
    for step, batch in enumerate(sampler.batches(DataLoader(range(24), batch_size=2, sampler=sampler)), start=1):
        before(step)
        trained += batch.tolist()
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return trained


@pytest.mark.threads
def test_what_an_island_that_died_had_not_contributed_is_trained_on_by_the_others():
    def island(store):
        with joined(store, 3) as islands:
            sampler = ElasticSampler(range(24), islands)
            model = new_model(islands.seat)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            with_bagua(model, optimizer, Algorithm.init("local_sgd", sync_every=PERIOD), between=islands)

            def die(step):
                if islands.seat == 1 and step == PERIOD + 2:
                    vanish(islands)

            return train_on(sampler, model, die)

    ends = [end for end in run(3, island, new_store()) if not isinstance(end, BaseException)]
    assert len(ends) == 2
    trained = [index for trained in ends for index in trained]
    missing = set(range(24)) - set(trained)
    assert len(trained) == len(set(trained))
    assert len(missing) == 2 * PERIOD  # What the one that died had contributed before.


@pytest.mark.threads
def test_a_newcomer_draws_what_nobody_else_does():
    came, seen, steps = threading.Event(), threading.Event(), 5 * PERIOD

    def island(store, number):
        if number == 2:
            assert seen.wait(60)
        with joined(store, 2) as islands:
            if number == 2:
                came.set()
            sampler = ElasticSampler(range(100), islands, shuffle=False)
            model = wrapped(islands, "local_sgd")
            (optimizer,) = model.bagua_optimizers
            step, trained = model.bagua_step, []
            for batch in sampler.batches(DataLoader(range(100), batch_size=2, sampler=sampler)):
                step += 1
                if step == PERIOD + 1 and number < 2:
                    seen.set()
                if step == 2 * PERIOD and number < 2:  # The next exchange has to see it.
                    assert came.wait(60)
                    records = islands._presence.roster.records
                    while 2 not in records or not records[2].waiting:
                        threading.Event().wait(0.002)
                        records = islands._presence.roster.records
                trained += batch.tolist()
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                if step == steps:
                    break
            return trained, sampler.give()

    lock, numbers, store = threading.Lock(), iter(range(3)), new_store()

    def numbered():
        with lock:
            number = next(numbers)
        return island(store, number)

    ends = run(3, numbered)
    position = ends[0][1]
    assert all(other == position for _, other in ends)
    assert sorted(len(trained) for trained, _ in ends) == [2 * 3 * PERIOD, 2 * steps, 2 * steps]
    trained = [index for trained, _ in ends for index in trained]
    assert len(trained) == len(set(trained))
    waiting = {*position["left"], *(number for numbers in position["own"].values() for number in numbers)}
    assert set(trained) == set(range(position["first"])) - waiting
