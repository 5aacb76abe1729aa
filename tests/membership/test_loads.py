"""What all islands must hold alike, when it is replaced on one island alone: refused, or an error that names it."""

from __future__ import annotations

import pytest
import torch

from bagua.algorithms.local import between_islands
from bagua.errors import CollectiveMismatchError, ConfigurationError
from tests.membership.training import (
    ALGORITHMS,
    PERIOD,
    among,
    among_ranks,
    check_equal,
    survivors,
    train,
    train_all,
    wrapped,
)

pytestmark = pytest.mark.threads
#: Algorithms that hold something alike on all islands.
ANCHORED = ["diloco", "slowmo"]


def load_others(model, by=1.0):
    """Load other weights, as a program does that goes on from a file."""
    model.load_state_dict({name: value + by for name, value in model.state_dict().items()})


def load_other_anchor(model, by):
    """Load a saved state whose anchor is larger by this share."""
    saved = model.bagua_state_dict()
    for state in saved["parameters"].values():
        state["anchor"].mul_(1 + by)
    model.bagua_load_state_dict(saved)


@pytest.mark.parametrize("algorithm", ANCHORED)
@pytest.mark.parametrize(("count", "strange"), [(3, (1,)), (2, (0, 1))])
def test_weights_loaded_on_one_island_before_the_first_exchange_end_all_and_name_it(algorithm, count, strange):
    def load(islands, model, step):
        if islands.seat == step == 1:
            load_others(model)

    ends = train_all(count, algorithm, 2, load)
    assert [type(end) for end in ends] == [CollectiveMismatchError] * count, ends
    assert [end.peers for end in ends] == [strange] * count
    assert "seats [1] is not that of seats [0, 2]" in str(ends[0]) or count == 2


@pytest.mark.parametrize("algorithm", ANCHORED)
def test_weights_loaded_on_all_islands_before_the_first_exchange_are_what_all_go_on_with(algorithm):
    ends = train_all(2, algorithm, 2, lambda islands, model, step: load_others(model) if step == 1 else None)
    assert len(check_equal(ends)) == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_load_after_the_first_exchange_is_refused_and_the_others_go_on(algorithm, what):
    refused = []

    def island(islands):
        model = wrapped(islands, algorithm)
        saved = model.bagua_state_dict()

        def before(step):
            if islands.seat != 1 or step != PERIOD + 2 - ALGORITHMS[algorithm].get("overlap", 0):
                return
            if what == "state":
                model.bagua_load_state_dict(saved)
            load_others(model)
            for _ in range(2):  # Also when it is tried once more.
                with pytest.raises(ConfigurationError, match="seat 1 loads") as caught:
                    model(torch.zeros(1, 3))
                refused.append(caught.value)
            raise caught.value

        return train(islands, model, 3 * PERIOD, before)

    ends = among(3, island)
    rows = survivors(ends)
    assert len(rows) == 2, ends
    assert [one.contributed for one in check_equal(rows).values()] == [(0, 1, 2), (0, 2), (0, 2)]
    assert len(refused) == (0 if what == "state" else 2)
    assert sum(isinstance(end, ConfigurationError) for end in ends) == 1


@pytest.mark.parametrize("algorithm", ANCHORED)
def test_weights_that_are_put_back_are_no_load(algorithm):
    def put_back(islands, model, step):
        if islands.seat == 1:  # As an evaluation with averaged weights does.
            kept = {name: value.clone() for name, value in model.state_dict().items()}
            load_others(model)
            model.load_state_dict(kept)

    assert len(check_equal(train_all(2, algorithm, before=put_back))) == 3


@pytest.mark.parametrize("algorithm", ANCHORED)
@pytest.mark.parametrize(("by", "goes_on"), [(1e-7, True), (1e-2, False)])
def test_shared_state_that_differs_ends_all_unless_that_is_rounding(algorithm, by, goes_on, caplog):
    """Islands on other processors round differently: that is told once, and newcomers are told to compare nothing."""

    def load(islands, model, step):
        if islands.seat == 2 and step == PERIOD:
            load_other_anchor(model, by)

    ends = train_all(3, algorithm, before=load)
    told = [record for record in caplog.records if "rounding" in record.message]
    if goes_on:
        assert ([len(rows) for rows in ends], len(told)) == ([3] * 3, 1)
    else:
        assert [(type(end), end.peers) for end in ends] == [(CollectiveMismatchError, (2,))] * 3


def test_every_rank_of_an_island_learns_which_island_differs():
    def rank(islands):
        model = wrapped(islands, "diloco")
        if islands.seat == 1:
            load_others(model)
        return train(islands, model, 2 * PERIOD)

    ends = [end for rows in among_ranks(2, rank) for end in rows]
    assert [(type(end), end.peers) for end in ends] == [(CollectiveMismatchError, (0, 1))] * 4


@pytest.mark.parametrize("changed", [1, 3])
def test_weights_that_differ_where_gradients_are_exchanged_end_all(changed, monkeypatch):
    monkeypatch.setattr(between_islands, "_COMPARE_EVERY", 4)

    def island(islands):
        model = wrapped(islands, "gradient_allreduce", elastic=True)

        def before(step):
            if islands.seat == 0 and step == changed:
                with torch.no_grad():
                    model.weight.add_(0.5)

        train(islands, model, 8, before)

    ends = among(3, island)
    assert [(type(end), end.peers) for end in ends] == [(CollectiveMismatchError, (0,))] * 3
