"""What a reducer is made of: the order of gradients, the phases, the formation, and its failure."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    DiLoCoAlgorithm,
    Every,
    Exchange,
    GradientAllReduceAlgorithm,
    Gradients,
    LocalSGDAlgorithm,
    Mean,
    Model,
    Replace,
)
from bagua.comm import solo_group
from bagua.engine.buckets.layout import GradientOrder
from bagua.engine.buckets.registration import Registration
from bagua.engine.formation import Formation
from bagua.engine.options import EngineOptions
from bagua.engine.schedule.courses import Clock, Course
from bagua.engine.schedule.phases import Phases
from bagua.engine.schedule.scheduler import Scheduler
from bagua.engine.state import checkpoints
from bagua.engine.state.agreement import StepFailure
from bagua.errors import CollectiveMismatchError, CommunicatorClosedError, ConfigurationError, PeerLostError
from tests.harness import mlp, seeded
from tests.parallel.wrapping import Loop, on_ranks


def layers() -> nn.Sequential:
    with seeded():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


# The order of gradients.


def test_a_gradient_appears_once_in_a_backward_pass():
    model = layers()
    order = GradientOrder(Registration(model))
    order.add(model[1].bias)
    with pytest.raises(ConfigurationError, match=r"1\.bias was accumulated twice"):
        order.add(model[1].bias)
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        order.add(nn.Parameter(torch.ones(4)))
    order.forget()
    order.add(model[1].bias)
    assert [id(parameter) for parameter in order.arrived] == [id(model[1].bias)]


@on_ranks(2)
def test_all_ranks_take_the_order_of_the_first():
    model, rank = layers(), bagua.comm.get_rank()
    order = GradientOrder(Registration(model))
    for parameter in reversed(list(model.parameters())) if rank == 0 else model.parameters():
        order.add(parameter)
    comm = bagua.comm.get_default_group().global_communicator
    told = order.agree(comm, find_unused=False, same_order=False, told=f"from {rank}")
    assert told == ["from 0", "from 1"]
    assert not order.arrived
    # 4 parameters of 16 to 64 bytes: one byte closes a bucket, and a gigabyte holds all.
    assert order.cut(1) == [[3], [2], [1], [0]]
    assert order.cut(2**30) == [[3, 2, 1, 0]]


@on_ranks(2)
def test_ranks_refuse_an_order_together():
    model, rank = layers(), bagua.comm.get_rank()
    comm = bagua.comm.get_default_group().global_communicator
    order = GradientOrder(Registration(model))
    for parameter in list(model.parameters())[rank:]:
        order.add(parameter)
    with pytest.raises(ConfigurationError, match=r"rank 1: 0\.weight"):
        order.agree(comm, find_unused=False, same_order=False, told="")
    for parameter in list(model.parameters())[:: 1 - 2 * rank]:
        order.add(parameter)
    with pytest.raises(CollectiveMismatchError, match="another order"):
        order.agree(comm, find_unused=False, same_order=True, told="")


def test_an_order_is_supposed_as_long_as_none_is_known():
    order = GradientOrder(Registration(layers()))
    order.suppose([[1, 0], [3, 2]])
    order.suppose([[0, 1, 2, 3]])
    assert order.cut(2**30) == [[1, 0, 3, 2]]
    order.suppose_reversed()
    assert order.cut(2**30) == [[3, 2, 1, 0]]


# Phases.


class _Turns(Algorithm):
    """Exchanges gradients in two steps, and nothing in the next two."""

    phases = ("on", "off")

    def phase(self, step: int, model: Model) -> Hashable:
        return self.phases[step // 2 % 2]

    def exchanges(self, phase: Hashable = "on") -> tuple[Exchange, ...]:
        return (Exchange(Gradients(), Every(1), Mean(), Replace()),) if phase == "on" else ()


def test_steps_are_counted_from_the_begin_of_a_phase():
    phases = Phases(2, torch.amp.GradScaler("cpu", init_scale=2.0))
    phases.bind(_Turns(), Model({}))
    seen = []
    for _ in range(6):
        if phases.is_over:
            phases.enter()
        clock = phases.clock
        seen.append((clock.step, clock.t, clock.loss_scale, phases.follows_gradients))
        phases.step += 1
    assert seen == [
        (0, 1, 2.0, True),
        (1, 2, 2.0, True),
        (2, 1, 2.0, False),
        (3, 2, 2.0, False),
        (4, 1, 2.0, True),
        (5, 2, 2.0, True),
    ]


def test_a_checkpoint_says_when_its_phase_began():
    phases = Phases(2)
    phases.bind(_Turns(), Model({}))
    phases.go_to(3, began=2)
    phases.enter()  # Buckets are formed.
    assert (phases.clock.step, phases.clock.t, phases.restored_at) == (3, 2, 3)
    assert not phases.exchanges


def test_a_rank_by_itself_makes_what_acts_alone():
    phases = Phases(1)
    phases.bind(_Turns(), Model({}))
    phases.enter()
    assert (phases.exchanges, phases.coming) == ((), ())


# The formation.


@on_ranks(2)
def test_a_formation_is_saved_and_loaded_without_a_reducer():
    options = EngineOptions(bucket_bytes=100)
    made = [Formation(mlp(), [], GradientAllReduceAlgorithm(), None, options) for _ in range(2)]
    first, second = made
    for parameter in reversed(first.registration.parameters):
        first.order.add(parameter)
    first.form_as_arrived()
    first.phases.step = 5
    saved = checkpoints.save(first)
    assert not second.scheduler.buckets
    checkpoints.load(second, saved)
    assert second.phases.step == 5
    names = [bucket.names for bucket in second.scheduler.buckets]
    assert names == [bucket.names for bucket in first.scheduler.buckets]
    assert [name for bucket in names for name in bucket] == [*reversed(first.registration.names)]
    assert checkpoints.digest(second) == checkpoints.digest(first)
    for one in made:
        one.close()


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


# Its failure.


def test_the_first_problem_is_the_one_that_is_told():
    group = solo_group().duplicate("failing")
    failure = StepFailure(group)
    failure.check()
    failure.tell(PeerLostError("rank 3 is gone"), "a step")
    failure.tell("words", "another step")
    with pytest.raises(CommunicatorClosedError, match="can no longer be synchronized: rank 3 is gone"):
        failure.check()


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
