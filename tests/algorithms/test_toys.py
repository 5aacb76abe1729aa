"""What the engine owes an algorithm: the order of its questions, lag, phases, memory, clocks. Shown on toys."""

from __future__ import annotations

import pytest
import torch

from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.parallel import with_bagua
from tests.algorithms.replicas import plain_sgd
from tests.algorithms.toys import LocalSgd, OwnSgd, WarmsUp
from tests.harness import (
    State,
    assert_close,
    mlp,
    reference,
    snapshot,
)
from tests.parallel.wrapping import Loop, assert_trained


def _loop(algorithm: Algorithm) -> Loop:
    return Loop("with_bagua", make_optimizer=plain_sgd, algorithm=algorithm)


@pytest.mark.parametrize("completes", ["forward", "state_dict", "bagua_state_dict", "with_bagua"])
def test_what_an_update_that_is_skipped_everywhere_owes_is_exchanged_later(thread_ranks, completes):
    def train() -> list[torch.Tensor]:
        loop = _loop(LocalSgd(period=1))
        weight = loop.model[0].weight
        with torch.no_grad():
            weight += loop.rank  # Something to be averaged.
        loop.backward()
        before = weight.detach().clone()
        {
            "forward": loop.loss,
            "state_dict": loop.wrapped.state_dict,
            "bagua_state_dict": loop.wrapped.bagua_state_dict,
            "with_bagua": lambda: with_bagua(loop.model, [loop.optimizer], GradientAllReduceAlgorithm()),
        }[completes]()
        return [before, weight.detach().clone()]

    first, second = thread_ranks(2, train)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_forwards_for_evaluation_owe_nothing_and_complete_nothing(thread_ranks):
    def train() -> torch.Tensor:
        loop = _loop(LocalSgd(period=1))
        with torch.no_grad():
            loop.model[0].weight += loop.rank
        loop.backward()
        if loop.rank == 0:
            loop.wrapped.eval()
            with torch.no_grad():
                loop.loss()
            loop.wrapped.train()
        return loop.model[0].weight.detach().clone()

    first, second = thread_ranks(2, train)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [1, 3])
def test_an_algorithm_that_owns_the_optimizer_steps_during_backward(thread_ranks, size):
    def train() -> State:
        loop = Loop(lambda model, _: with_bagua(model, [], OwnSgd(), bucket_bytes=1000))
        for _ in range(5):
            loop.model.zero_grad()
            loop.backward()
        return snapshot(loop.model)

    assert_trained(thread_ranks(size, train), reference(mlp(), plain_sgd, size, range(5)))


def test_a_change_of_phase_forms_new_buckets_if_it_must_and_carries_memory_over(thread_ranks):
    def train() -> tuple[list[list[int]], State, State]:
        loop, sizes, totals = Loop("with_bagua", algorithm=WarmsUp(warmup_steps=3)), [], {}
        for _ in range(6):
            loop.train()
            sizes.append([bucket.numel % 6 for bucket in loop.wrapped.bagua_buckets])
            for name, parameter in loop.model.named_parameters():
                totals[name] = totals.get(name, 0) + parameter.grad
        remembered = loop.wrapped.bagua_state_dict()["parameters"]
        saved = {name: state["total"] for name, state in remembered.items()}
        return sizes, saved, totals

    results = thread_ranks(3, train)
    for sizes, saved, totals in results:
        assert sizes[2] != [0, 0], "padded before it is needed"
        assert sizes[3:] == [[0, 0]] * 3, "three ranks, two numbers of eight bytes"
        assert_close(saved, {name: totals[name] for name in saved})
