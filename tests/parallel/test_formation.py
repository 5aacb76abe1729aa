"""Buckets that cannot be made, and steps in which nothing is due."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import (
    DiLoCoAlgorithm,
    GradientAllReduceAlgorithm,
    LocalSGDAlgorithm,
    Model,
)
from bagua.engine.formation import Formation
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.courses import Clock, Course
from bagua.engine.schedule.phases import Phases
from bagua.engine.schedule.scheduler import Scheduler
from bagua.errors import CommunicatorClosedError, PeerLostError
from tests.harness import mlp, seeded
from tests.parallel.wrapping import Loop, on_ranks


def layers() -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def test_a_rank_by_itself_makes_what_acts_alone():
    phases = Phases(1)
    phases.bind(GradientAllReduceAlgorithm(), Model({}))
    phases.enter()
    assert (phases.exchanges, phases.coming) == ((), ())


@on_ranks(2)
def test_buckets_that_cannot_be_made_end_training_on_all_ranks():
    formation = Formation(mlp(), [], GradientAllReduceAlgorithm(), None, EngineOptions())
    if bagua.comm.get_rank() == 1:

        def fail(*_: object) -> None:
            raise MemoryError("no memory for buckets")

        formation.scheduler.execute = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError):
            formation.form([[*range(len(formation.registration.names))]])
        with pytest.raises(CommunicatorClosedError, match="no memory for buckets"):
            formation.failure.check()
    else:
        with pytest.raises(PeerLostError, match="the making of its buckets"):
            formation.group.global_communicator.barrier()
        formation.failure.check()


def test_what_is_owed_belongs_to_the_step_in_which_it_became_due(thread_ranks, monkeypatch):
    started: list[tuple[int, int]] = []
    start = Course.start

    def note(self: Course, clock: Clock) -> None:
        started.append((bagua.comm.get_rank(), clock.t))
        start(self, clock)

    monkeypatch.setattr(Course, "start", note)

    def train() -> None:
        loop = Loop("with_bagua", layers, algorithm=LocalSGDAlgorithm(sync_every=3))
        for _ in range(2):
            loop.model(torch.ones(2, 4)).sum().backward()
            loop.optimizer.step()
        loss = loop.model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        loop.optimizer.step()

    thread_ranks(2, train)
    assert {t for _, t in started} == {3}
    assert {rank for rank, _ in started} == {0, 1}


@pytest.mark.parametrize(
    ("algorithm", "begun"),
    [
        (LocalSGDAlgorithm(sync_every=4), [0, 3, 4, 7]),
        (DiLoCoAlgorithm(sync_every=6, overlap=2), [0, 3, 4, 5, 6]),  # Starts in step 3, and is back in step 5.
        (GradientAllReduceAlgorithm(), [*range(8)]),
    ],
)
def test_steps_in_which_nothing_is_due_are_only_counted(thread_ranks, monkeypatch, algorithm, begun):
    seen: list[tuple[int, int]] = []
    begin = Scheduler.begin

    def note(self: Scheduler, clock: Clock) -> None:
        seen.append((bagua.comm.get_rank(), clock.step))
        begin(self, clock)

    monkeypatch.setattr(Scheduler, "begin", note)

    def train() -> int:
        loop = Loop("with_bagua", layers, algorithm=algorithm)
        for _ in range(8):
            loop.model(torch.ones(2, 4)).sum().backward()
            loop.optimizer.step()
        return loop.reducer.step

    assert thread_ranks(2, train) == [8, 8]
    assert sorted(set(seen)) == [(rank, step) for rank in range(2) for step in begun]


@on_ranks(2)
def test_gradients_may_be_told_of_by_hand_in_a_step_in_which_nothing_is_due():
    loop = Loop("with_bagua", layers, algorithm=LocalSGDAlgorithm(sync_every=8))
    loop.model(torch.ones(2, 4)).sum().backward()
    loop.optimizer.step()
    for _ in range(3):
        for parameter in loop.model.parameters():
            loop.reducer.mark_tensor_ready(parameter)
        loop.reducer.mark_on_complete()
    assert loop.reducer.step == 4
