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
from tests.harness import State, assert_same_on_all_ranks, snapshot
from tests.parallel.wrapping import Loop, of_this_rank, on_ranks

ALGORITHMS = [name for name in sorted(registry) if not Algorithm.init(name).in_background]
#: Options that have each algorithm do what it does at once.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"sync_every": 2, "start_after": 0} for name in ("local_sgd", "slowmo", "diloco", "sparse_loco")},
    **{name: {"warmup_steps": 2} for name in ("bytegrad", "top_k", "sign_sgd", "loco", "power_sgd")},
}


def started(name: str) -> Loop:
    """A model that was trained for five steps."""
    algorithm = Algorithm.init(name, **OPTIONS.get(name, {}))
    loop = Loop("with_bagua", of_this_rank, optimizer_maker(algorithm), algorithm=algorithm)
    loop.train(5)
    return loop


def _stepped(loop: Loop) -> None:
    """Have the optimizer step the parameters that the model has now."""
    kept = set(loop.model.parameters())
    for gone in [one for one in loop.optimizer.state if one not in kept]:
        loop.optimizer.state.pop(gone)
    loop.optimizer.param_groups[0]["params"][:] = loop.model.parameters()


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
        loop = started(name)
        if loop.rank == 0:
            torch.manual_seed(7)
        bagua.comm.barrier()
        with torch.no_grad():
            change(loop.model)
            for parameter in loop.model.parameters():  # Threads share the generator.
                bagua.comm.broadcast(parameter.detach())
        _stepped(loop)
        loop.train(4)
        loop.wrapped.bagua_finish()
        return snapshot(loop.model)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert all(value.isfinite().all() for value in states[0].values())


@pytest.mark.parametrize("name", ["diloco", "slowmo", "sparse_loco"])
@pytest.mark.parametrize("change", [new_weight, inserted, wider])
@on_ranks(2)
def test_a_new_parameter_is_not_pulled_to_what_another_one_was(name, change):
    loop = started(name)
    loop.train()
    old = {id(parameter) for parameter in loop.model.parameters()}
    change(loop.model)
    new = [parameter for parameter in loop.model.parameters() if id(parameter) not in old]
    assert new
    for parameter in new:
        nn.init.ones_(parameter)
    _stepped(loop)
    loop.optimizer.param_groups[0]["lr"] = 0.0
    loop.train(6)
    assert max(float((parameter.detach() - 1).abs().max()) for parameter in new) < 1e-6


def frozen_elsewhere(model: nn.Sequential) -> None:
    """Ranks change their models differently, and try again, as cells of a notebook do."""
    model[2 * bagua.comm.get_rank()].requires_grad_(False)


def without_a_shape(model: nn.Sequential) -> None:
    model[2] = nn.LazyLinear(16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, frozen_elsewhere) for name in ("gradient_allreduce", "bytegrad", "local_sgd")),
        ("gradient_allreduce", without_a_shape),
    ],
)
@on_ranks(2)
def test_after_a_change_that_failed_each_step_says_so(name, change):
    loop = started(name)
    change(loop.model)
    with pytest.raises(BaguaError):
        loop.train()
    for _ in range(3):
        with pytest.raises(CommunicatorClosedError, match="can no longer be synchronized"):
            loop.loss()
