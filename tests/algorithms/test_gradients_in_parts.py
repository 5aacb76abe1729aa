"""Gradients that are exchanged by layer, or only some of them: not where they arrive together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm, Every, Exchange, Flight, Gradients, Mean, Parts, Replace, Sum
from bagua.engine.formation import Formation
from bagua.parallel import with_bagua
from tests.harness import (
    State,
    assert_close,
    loss_of,
    mlp,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import Loop, on_ranks

BY_LAYER = Exchange(Gradients(), Every(), Mean(), Replace(), at="backward ends", parts=Parts(3, "strided"))


def train(algorithm: Algorithm) -> State:
    return Loop("with_bagua", lambda: mlp(bagua.comm.get_rank()), algorithm=algorithm).train(6)


@on_ranks(2)
def test_a_sum_of_gradients_that_nobody_used_stays_none():
    model = torch.nn.ModuleList([mlp(), torch.nn.Linear(2, 2)])
    algorithm = Algorithm.of(dataclasses.replace(BY_LAYER, how=Sum()))
    wrapped = with_bagua(model, [sgd(model.parameters())], algorithm, find_unused_parameters=True)
    for step in range(2):
        loss_of(wrapped[0], bagua.comm.get_rank(), step).backward()
    assert [one.grad is None for one in model.parameters()] == [False] * 6 + [True] * 2


@dataclass(frozen=True)
class OwnShare(Replace):
    """Gradients become what this rank sent, once it is known to have been sent."""

    def start(self, flight: Flight) -> None:
        flight.keep()

    def fold(self, flight: Flight) -> None:
        assert flight.sent is not None
        flight.flat.copy_(flight.sent)
        super().fold(flight)


@pytest.mark.parametrize("parts", [Parts(), BY_LAYER.parts], ids=["arrival", "strided"])
def test_what_was_sent_is_known_without_the_factor_of_the_mean(thread_ranks, parts, monkeypatch):
    monkeypatch.setattr(Formation, "concern_step", lambda *_: None)  # Each rank steps with its own gradients.
    algorithm = Algorithm.of(dataclasses.replace(BY_LAYER, then=OwnShare(), parts=parts))
    for rank, state in enumerate(thread_ranks(2, train, algorithm)):
        alone = mlp()
        train_steps(alone, sgd(alone.parameters()), rank, range(6))
        assert_close(state, snapshot(alone))
