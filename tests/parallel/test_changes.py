"""Models that change on all ranks while they train: what is remembered belongs to a parameter, not to its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm, registry
from bagua.errors import BaguaError, CommunicatorClosedError
from tests.contract.algorithms import optimizer_maker
from tests.harness import State, assert_same_on_all_ranks, loss_of, mlp, snapshot, train_steps
from tests.parallel.wrapping import WRAPS, Loop, by_with_bagua, on_ranks

ALGORITHMS = [name for name in sorted(registry) if not Algorithm.init(name).in_background]
#: Options that have each algorithm do what it does at once.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"sync_every": 2, "start_after": 0} for name in ("local_sgd", "slowmo", "diloco", "sparse_loco")},
    **{name: {"warmup_steps": 2} for name in ("bytegrad", "top_k", "sign_sgd", "loco", "power_sgd")},
}


def started(name: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model that was trained for five steps, its optimizer, and a function that trains it on."""
    rank, steps = bagua.comm.get_rank(), iter(range(100))
    model = mlp(seed=rank)
    algorithm = Algorithm.init(name, **OPTIONS.get(name, {}))
    optimizer = optimizer_maker(algorithm)(model.parameters())
    by_with_bagua(model, optimizer, algorithm=algorithm)

    def train(count: int) -> None:
        train_steps(model, optimizer, rank, (next(steps) for _ in range(count)))

    train(5)
    return model, optimizer, train


def _stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Have ``optimizer`` step the parameters that ``model`` has now."""
    kept = set(model.parameters())
    for gone in [one for one in optimizer.state if one not in kept]:
        optimizer.state.pop(gone)
    optimizer.param_groups[0]["params"][:] = model.parameters()


def new_head(model: nn.Sequential) -> None:
    model[4] = nn.Linear(16, 4)


def new_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(torch.eye(16))


def inserted(model: nn.Sequential) -> None:
    model.insert(2, nn.Linear(16, 16))


def removed(model: nn.Sequential) -> None:
    model.pop(2)


def wider(model: nn.Sequential) -> None:
    model[2], model[4] = nn.Linear(16, 20), nn.Linear(20, 4)


CHANGES: list[Callable[[nn.Sequential], None]] = [new_head, new_weight, inserted, removed, wider]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changes_on_all_ranks_is_trained_together_on(thread_ranks, name, change):
    def train() -> State:
        model, optimizer, go_on = started(name)
        if bagua.comm.get_rank() == 0:
            torch.manual_seed(7)
        bagua.comm.barrier()
        with torch.no_grad():
            change(model)
            for parameter in model.parameters():  # Threads share the generator.
                bagua.comm.broadcast(parameter.detach())
        _stepped(optimizer, model)
        go_on(4)
        model.bagua_finish()
        return snapshot(model)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.parametrize("name", ["diloco", "slowmo", "sparse_loco"])
@pytest.mark.parametrize("change", [new_weight, inserted, wider])
def test_a_new_parameter_is_not_pulled_to_what_another_one_was(thread_ranks, name, change):
    def train() -> list[float]:
        model, optimizer, go_on = started(name)
        go_on(1)
        old = {id(parameter) for parameter in model.parameters()}
        change(model)
        new = [parameter for parameter in model.parameters() if id(parameter) not in old]
        for parameter in new:
            nn.init.ones_(parameter)
        _stepped(optimizer, model)
        optimizer.param_groups[0]["lr"] = 0.0
        go_on(6)
        return [float((parameter.detach() - 1).abs().max()) for parameter in new]

    for moved in thread_ranks(2, train):
        assert moved
        assert max(moved) < 1e-6


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_layer_in_the_place_of_another_is_exchanged(thread_ranks, wrap):
    def train() -> State:
        loop = Loop(wrap)
        loop.train(2)
        loop.model[2] = mlp(seed=5)[2]
        loop.optimizer.param_groups[0]["params"][:] = loop.model.parameters()
        return loop.train(3)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert not torch.equal(states[0]["2.weight"], mlp(seed=5)[2].weight), "it was trained"


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "local_sgd"])
@on_ranks(2)
def test_after_a_change_that_failed_each_step_says_so(name):
    """Ranks change their models differently, and try again, as cells of a notebook do."""
    model, _, go_on = started(name)
    model[2 * bagua.comm.get_rank()].requires_grad_(False)
    with pytest.raises(BaguaError):
        go_on(1)
    for _ in range(3):
        with pytest.raises(CommunicatorClosedError, match="can no longer be synchronized"):
            loss_of(model, bagua.comm.get_rank(), 0)


@on_ranks(2)
def test_a_change_that_cannot_be_registered_ends_training_on_all_ranks():
    model, _, go_on = started("gradient_allreduce")
    model[2] = nn.LazyLinear(16)
    for error in (BaguaError, CommunicatorClosedError):
        with pytest.raises(error):
            go_on(1)
