"""Training on n ranks is training on the data of all of them: against mathematics and against torch DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bagua.comm
from bagua.algorithms import Mean
from bagua.engine.state.equality import EqualityCheck
from tests.harness import (
    adam,
    assert_close,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import WRAPS

OPTIMIZERS = {"sgd": sgd, "adam": adam}
STEPS = range(20)


def _train(wrap: str, optimizer: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    rank = bagua.comm.get_rank()
    model = mlp(seed=rank)  # Rank 0's weights must win.
    made = OPTIMIZERS[optimizer](model.parameters())
    wrapped = WRAPS[wrap](model, made, **options)
    train_steps(wrapped, made, rank, STEPS)
    return snapshot(model)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_way_in_trains_on_the_mean_of_all_gradients(thread_ranks, wrap, size):
    states = thread_ranks(size, _train, wrap, "sgd", {})
    assert_same_on_all_ranks(states)
    assert_close(states[0], reference(mlp(), sgd, size, STEPS))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("delay_reduce", [False, True])
@pytest.mark.parametrize("fusion", [False, True])
def test_overlap_and_fusion_do_not_change_the_result(thread_ranks, optimizer, delay_reduce, fusion):
    options = {"delay_reduce": delay_reduce, "fusion": fusion}
    states = thread_ranks(3, _train, "bagua_init", optimizer, options)
    assert_same_on_all_ranks(states)
    assert_close(states[0], reference(mlp(), OPTIMIZERS[optimizer], 3, STEPS))


def _train_both_every_way() -> dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """By optimizer and options: the states that bagua and torch DDP end with."""
    rank = bagua.comm.get_rank()
    results = {}
    for name, make in OPTIMIZERS.items():
        theirs = mlp()
        made = make(theirs.parameters())
        train_steps(torch.nn.parallel.DistributedDataParallel(theirs), made, rank, STEPS)
        for options in ({}, {"delay_reduce": True}, {"fusion": False}):
            results[f"{name} {options}"] = _train("bagua_init", name, options), snapshot(theirs)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_processes_agree_bitwise_and_equal_torch_ddp(process_ranks, size):
    results = process_ranks(size, _train_both_every_way)
    assert len(results[0]) == 6
    for way in results[0]:
        assert_same_on_all_ranks([result[way][0] for result in results])
        for result in results:
            assert_close(*result[way])


def test_the_equality_tests_notice_an_exchange_that_does_nothing(thread_ranks, monkeypatch):
    monkeypatch.setattr(Mean, "run", lambda self, flight, group: None)
    monkeypatch.setattr(EqualityCheck, "concerns", lambda *_: False)  # Otherwise bagua notices it.
    states = thread_ranks(2, _train, "with_bagua", "sgd", {})
    with pytest.raises(AssertionError, match="differs between"):
        assert_same_on_all_ranks(states)
    with pytest.raises(AssertionError):
        assert_close(states[0], reference(mlp(), sgd, 2, STEPS))


def _first_gradients(delay_reduce: bool) -> dict[str, torch.Tensor]:
    rank = bagua.comm.get_rank()
    model = mlp()
    optimizer = adam(model.parameters())
    wrapped = WRAPS["bagua_init"](model, optimizer, delay_reduce=delay_reduce)
    first = []
    for step in (0, 0):  # The weights are not changed: both steps must give the same gradients.
        optimizer.zero_grad()
        loss_of(wrapped, rank, step).backward()
        first.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in first[0].items():
        assert torch.equal(gradient, first[1][name]), name
    return first[0]


@pytest.mark.parametrize("delay_reduce", [False, True])
def test_the_first_step_computes_what_every_other_step_computes(thread_ranks, delay_reduce):
    assert_same_on_all_ranks(thread_ranks(3, _first_gradients, delay_reduce))
