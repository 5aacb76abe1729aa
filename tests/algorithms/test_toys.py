"""What the engine owes an algorithm: the order of its questions, lag, phases, memory, clocks. Shown on toys."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm, Every, GradientAllReduceAlgorithm
from bagua.parallel import with_bagua
from tests.algorithms.toys import DelayedGossip, LocalSgd, MeetNeighbour, OwnSgd, Rounded, WarmsUp
from tests.contract.algorithms import AlgorithmContract
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    reference,
    snapshot,
)
from tests.parallel.wrapping import Loop


@pytest.fixture
def pool(thread_pool):
    return thread_pool


class TestDelayedGossip(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return DelayedGossip()


class TestRounded(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return Rounded()


class TestLocalSgd(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return LocalSgd()


class TestWarmsUp(AlgorithmContract):
    @pytest.fixture
    def algorithm(self):
        return WarmsUp()


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _train(algorithm: Algorithm, steps: int, **options: object) -> State:
    loop = Loop("with_bagua", make_optimizer=plain_sgd, algorithm=algorithm, **options)
    loop.train(steps)
    loop.wrapped.bagua_state_dict()  # Completes what is owed.
    return snapshot(loop.model)


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def _local_step(model: torch.nn.Module, rank: int, step: int) -> None:
    optimizer = plain_sgd(model.parameters())
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def _add(model: torch.nn.Module, change: torch.Tensor) -> None:
    pieces = change.split([parameter.numel() for parameter in model.parameters()])
    with torch.no_grad():
        for parameter, piece in zip(model.parameters(), pieces, strict=True):
            parameter.add_(piece.view_as(parameter))


def test_a_result_with_lag_1_is_used_one_step_later(thread_ranks):
    """In each backward, before the next exchange starts: ``x <- x + (mixed - sent)`` of the step before."""
    size, steps = 4, 5
    models = [mlp() for _ in range(size)]
    changes = [torch.zeros_like(_flat(models[0])) for _ in models]
    for step in range(steps):
        for rank, model in enumerate(models):  # Gradients are taken before the change is added.
            before = _flat(model)
            _local_step(model, rank, step)
            updated = _flat(model) - before
            _add(model, -updated)
            _add(model, changes[rank])
            changes[rank] = updated
        sent = [_flat(model) for model in models]
        for rank, model in enumerate(models):
            _add(model, changes[rank])
            changes[rank] = (sent[MeetNeighbour.peer(rank, size, step)] - sent[rank]) / 2
    results = thread_ranks(size, _train_without_completing, steps)
    for state, model in zip(results, models, strict=True):
        assert_close(state, snapshot(model))


def _train_without_completing(steps: int) -> State:
    return Loop("with_bagua", make_optimizer=plain_sgd, algorithm=DelayedGossip()).train(steps)


def test_an_exchange_after_the_optimizer_sees_the_updated_weights(thread_ranks):
    results = thread_ranks(3, _train, LocalSgd(period=2), 6)
    models = [mlp() for _ in range(3)]
    for step in range(6):
        for rank, model in enumerate(models):
            _local_step(model, rank, step)
        if step % 2 == 1:
            mean = torch.stack([_flat(model) for model in models]).mean(dim=0)
            for model in models:
                _add(model, mean - _flat(model))
    assert_same_on_all_ranks(results)
    assert_close(results[0], snapshot(models[0]))


@pytest.mark.parametrize("completes", ["forward", "state_dict", "bagua_state_dict", "with_bagua"])
def test_what_an_update_that_is_skipped_everywhere_owes_is_exchanged_later(thread_ranks, completes):
    def train() -> list[State]:
        loop = Loop("with_bagua", mlp, plain_sgd, algorithm=LocalSgd(period=1))
        with torch.no_grad():
            loop.model[0].weight += loop.rank  # Something to be averaged.
        loss_of(loop.wrapped, loop.rank, 0).backward()
        before = {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}
        if completes == "forward":
            loss_of(loop.wrapped, loop.rank, 1)
        elif completes == "state_dict":
            loop.wrapped.state_dict()
        elif completes == "bagua_state_dict":
            loop.wrapped.bagua_state_dict()
        else:
            with_bagua(loop.model, [loop.optimizer], GradientAllReduceAlgorithm())
        return [before, {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}]

    first, second = thread_ranks(2, train)
    assert not torch.equal(first[0]["0.weight"], second[0]["0.weight"])
    assert torch.equal(first[1]["0.weight"], second[1]["0.weight"])


def test_forwards_for_evaluation_owe_nothing_and_complete_nothing(thread_ranks):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        wrapped = with_bagua(model, [plain_sgd(model.parameters())], LocalSgd(period=1))
        with torch.no_grad():
            model[0].weight += rank
        loss_of(wrapped, rank, 0).backward()
        if rank == 0:
            wrapped.eval()
            with torch.no_grad():
                loss_of(wrapped, rank, 1)
            wrapped.train()
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    first, second = thread_ranks(2, train)
    assert not torch.equal(first["0.weight"], second["0.weight"])


@pytest.mark.parametrize("size", [1, 3])
def test_an_algorithm_that_owns_the_optimizer_steps_during_backward(thread_ranks, size):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        wrapped = with_bagua(model, [], OwnSgd(), bucket_bytes=1000)
        for step in range(5):
            model.zero_grad()
            loss_of(wrapped, rank, step).backward()
        return snapshot(model)

    results = thread_ranks(size, train)
    assert_same_on_all_ranks(results)
    assert_close(results[0], reference(mlp(), plain_sgd, size, range(5)))


def test_a_change_of_phase_forms_new_buckets_if_it_must_and_carries_memory_over(thread_ranks):
    def train() -> tuple[list[list[int]], State, State]:
        loop, sizes, totals = Loop("with_bagua", algorithm=WarmsUp(warmup_steps=3)), [], {}
        for _ in range(6):
            loop.train()
            sizes.append([bucket.numel % 6 for bucket in loop.wrapped.bagua_buckets])
            for name, parameter in loop.model.named_parameters():
                totals[name] = totals.get(name, 0) + parameter.grad
        remembered = loop.wrapped.bagua_state_dict()
        saved = {name: state["total"] for name, state in _parameters_of(remembered).items()}
        return sizes, saved, totals

    results = thread_ranks(3, train)
    for sizes, saved, totals in results:
        assert sizes[2] != [0, 0], "padded before it is needed"
        assert sizes[3:] == [[0, 0]] * 3, "three ranks, two numbers of eight bytes"
        assert_close(saved, {name: totals[name] for name in saved})


def _parameters_of(remembered: dict) -> dict[str, State]:
    return remembered["parameters"] if "parameters" in remembered else remembered["state"]["parameters"]


def test_a_local_sgd_that_never_exchanges_would_be_noticed(thread_ranks, monkeypatch):
    monkeypatch.setattr(Every, "due", lambda self, t, *_: False)
    first, second = thread_ranks(2, _train, LocalSgd(period=2), 6)
    assert not torch.equal(first["0.weight"], second["0.weight"])
