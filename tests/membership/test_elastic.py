"""Gradients that are exchanged between islands in each step, while islands die and come."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua.comm import get_rank, inject_fault
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua
from bagua.testing.ranks import RankDiedError
from tests.membership.training import RATE, batch, joined, new_model, new_store, run, run_islands, together, vanish

pytestmark = pytest.mark.threads


def wrapped(islands):
    model = new_model(10 * islands.seat)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return with_bagua(model, optimizer, "gradient_allreduce", between=islands, elastic=True)


def train(islands, model, steps, rank=0, before=lambda step: None):
    """The weights after each step, and who contributed to it."""
    (optimizer,) = model.bagua_optimizers
    found = {}
    for step in range(model.bagua_step + 1, steps + 1):
        before(step)
        optimizer.zero_grad()
        model(batch(islands.seat) + rank / 8).square().sum().backward()
        optimizer.step()
        found[step] = (model.weight.detach().clone(), islands.members().contributed)
    return found


def check(rows, ranks=1):
    """All agree bit by bit, and have what plain torch has; who contributed to each step."""
    by_step = {}
    for row in rows:
        for step, (weights, contributed) in row.items():
            other = by_step.setdefault(step, (weights, contributed))
            assert torch.equal(weights, other[0])
            assert contributed == other[1]
    crowds = [by_step[step][1] for step in sorted(by_step)]
    model = new_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step, seats in enumerate(crowds, start=1):
        optimizer.zero_grad()
        for seat in seats:
            for rank in range(ranks):
                (model(batch(seat) + rank / 8).square().sum() / ranks / len(seats)).backward()
        optimizer.step()
        torch.testing.assert_close(by_step[step][0], model.weight.detach())
    return crowds


def test_gradients_are_means_over_islands():
    store = new_store()

    def island():
        with joined(store, 3) as islands:
            return train(islands, wrapped(islands), 4)

    assert check(run(3, island)) == [(0, 1, 2)] * 4


def test_gradients_are_means_over_islands_of_two_ranks():
    store = new_store()

    def rank(_):
        with together(store, 2) as islands:
            return train(islands, wrapped(islands), 3, get_rank())

    assert check([row for rows in run_islands(2, rank) for row in rows], ranks=2) == [(0, 1)] * 3


def test_an_island_that_dies_in_a_step_costs_the_others_nothing():
    """They all make the step with it, or all without it; wherever in the exchange it dies."""
    passed = []

    def train_to(fault):
        store = new_store()

        def island():
            armed = []

            def hook(_):
                if armed and islands.seat == 1:
                    fault(islands)

            with joined(store, 3) as islands, inject_fault(hook):
                model = wrapped(islands)
                rows = train(islands, model, 1)
                armed.append(True)
                rows |= train(islands, model, 2)
                armed.clear()
                return {**rows, **train(islands, model, 4)}

        return run(3, island)

    train_to(lambda islands: passed.append(None))
    assert len(passed) > 5
    seen = set()
    for place in range(0, len(passed), max(1, len(passed) // 6)):
        places = iter(range(len(passed)))

        def fault(islands, place=place, places=places):
            if next(places) == place:
                vanish(islands)

        ends = train_to(fault)
        rows = [end for end in ends if isinstance(end, dict)]
        assert len(rows) == 2, ends
        assert sum(isinstance(end, RankDiedError) for end in ends) == 1, ends
        crowds = check(rows)
        assert (crowds[0], crowds[2:]) == ((0, 1, 2), [(0, 2)] * 2)
        seen.add(crowds[1])
    assert (0, 2) in seen


def test_a_newcomer_comes_in_between_two_steps_with_the_momentum_of_the_others():
    came, seen, store, lock, numbers = threading.Event(), threading.Event(), new_store(), threading.Lock(), iter("012")

    def island():
        with lock:
            late = next(numbers) == "2"
        if late:
            assert seen.wait(60)
        with joined(store, 2) as islands:
            if late:
                came.set()

            def pace(step):
                if step == 2 and not late:
                    seen.set()
                    assert came.wait(60)
                    while 2 not in (records := islands._state.roster.records) or not records[2].waiting:
                        threading.Event().wait(0.002)

            return train(islands, wrapped(islands), 5, before=pace)

    rows = run(3, island)
    assert sorted(min(row) for row in rows) == [1, 1, 3]
    assert check(rows) == [(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2)]


@pytest.mark.parametrize(
    ("algorithm", "options", "why"),
    [
        ("gradient_allreduce", {"elastic": False}, "gradients would be exchanged in each step"),
        ("scatter_gather_allreduce", {}, "only sums and means"),
        ("gradient_allreduce", {"between": None}, "only islands come and go"),
        ("gradient_allreduce", {"elastic": 1}, "argument elastic"),
    ],
)
def test_what_cannot_be_elastic_is_refused(algorithm, options, why):
    with joined(new_store(), 1) as islands, pytest.raises(ConfigurationError, match=why):
        with_bagua(new_model(0), [], algorithm, **{"between": islands, "elastic": True, **options})
