"""What members give newcomers, and when it is copied."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua.algorithms import Algorithm
from bagua.comm import Fetch, PhaseDeadline, decode, encoded_later
from bagua.compression import Float16
from tests.membership.training import PERIOD, among, joined, new_store, train, wrapped

pytestmark = pytest.mark.threads


def offered_by(islands):
    """The parts of the state that a member offers, as a newcomer gets them."""
    source = islands._state.record.offer.source
    _, contents = Fetch({}, frozenset(), PhaseDeadline(60.0)).run(lambda: [source])
    return {name: decode(torch.frombuffer(content, dtype=torch.uint8)) for name, content in contents.items()}


def test_a_state_is_copied_while_training_goes_on_and_before_an_exchange_changes_it(monkeypatch):
    """The copy is held up until the exchange asks for it; if it did not ask, it would be that of the next anchor."""
    asked = threading.Event()

    def held_up(part):
        memory, copy = encoded_later(part)
        late = isinstance(part, dict) and "buckets" in part
        return memory, (lambda: asked.wait(60) and copy()) if late else copy

    monkeypatch.setattr("bagua.membership.transfer.encoded_later", held_up)
    with joined(new_store(), 1) as islands:
        model = wrapped(islands, "diloco")
        train(islands, model, PERIOD)
        anchor = model.bagua_state_dict()["parameters"]["weight"]["anchor"]
        weights, donor = model.weight.detach().clone(), islands._counterparts.donor
        islands._counterparts.donor.offer([1, 1])
        settle = donor.settle
        donor.settle = lambda: (asked.set(), settle())
        train(islands, model, 2 * PERIOD)
        asked.set()
        given = offered_by(islands)
        assert not torch.equal(model.bagua_state_dict()["parameters"]["weight"]["anchor"], anchor)
    assert torch.equal(given["engine"]["parameters"]["weight"]["anchor"], anchor)
    assert torch.equal(given["tensors"]["weight"], weights)


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
