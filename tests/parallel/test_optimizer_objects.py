"""Optimizers stay the user's objects: wrapping gives them rank 0's values, in the groups that schedulers hold."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

import bagua.comm
from bagua.errors import BaguaError, CollectiveMismatchError, ConfigurationError
from bagua.parallel import broadcast_optimizer_state
from tests.harness import State, assert_same_on_all_ranks, mlp, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, by_with_bagua, on_ranks


class Around(torch.optim.Optimizer):
    """Shares groups and state with another optimizer, as Lookahead and SAM do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.state = base, base.param_groups, base.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "diloco"])
@on_ranks(2)
def test_a_group_that_the_script_holds_is_the_one_that_trains(algorithm):
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[4].parameters()}], lr=0.1)
    head, groups = optimizer.param_groups[1], optimizer.param_groups
    by_with_bagua(model, optimizer, algorithm=algorithm)
    assert optimizer.param_groups is groups
    for step in range(3):
        head["lr"] = 0.1 / (step + 1)
        train_steps(model, optimizer, rank, [step])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1 / 3]


@on_ranks(2, assert_same_on_all_ranks)
def test_an_optimizer_around_another_one_steps_alike_on_all_ranks() -> State:
    loop = Loop("with_bagua", mlp, lambda parameters: Around(sgd(parameters)))
    schedule = torch.optim.lr_scheduler.StepLR(loop.optimizer, 1, 0.5)
    for _ in range(4):
        loop.train()
        schedule.step()
    assert loop.optimizer.base.param_groups[0]["lr"] == loop.optimizer.param_groups[0]["lr"]
    return snapshot(loop.model)


@pytest.mark.parametrize("door", ["wrap", "join"])
@on_ranks(2, assert_same_on_all_ranks)
def test_state_is_written_into_the_tensors_that_are_there(door) -> State:
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (rank + 1))
    train_steps(model, optimizer, rank, [0])  # Not wrapped yet: momenta differ.
    first = next(model.parameters())
    held, state = optimizer.state[first], optimizer.state
    momentum = held["exp_avg"]
    by_with_bagua(model, optimizer)
    if door == "join":
        with model.join():
            train_steps(model, optimizer, rank, range(1, 2 + rank))
    assert optimizer.state is state
    assert optimizer.state[first] is held
    assert held["exp_avg"] is momentum
    return {"momentum": momentum.clone(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


@pytest.mark.parametrize("stepped", [0, 1])
@on_ranks(2, assert_same_on_all_ranks)
def test_state_is_that_of_rank_0_also_where_it_has_none(stepped) -> State:
    """As after loading a checkpoint on one rank only."""
    rank, model = bagua.comm.get_rank(), mlp()
    optimizer = torch.optim.Adam(model.parameters())
    if rank == stepped:
        train_steps(model, optimizer, rank, [0])
    by_with_bagua(model, optimizer)
    assert len(optimizer.state) == (6 if stepped == 0 else 0)
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def double(step: int) -> int:
    return 2 * step


class Unknown:
    """What no message can hold."""


OF_A_GROUP: dict[str, Any] = {
    "float64": np.float64(0.25), "float32": np.float32(0.25), "int64": np.int64(3), "bool": np.bool_(True),
    "dtype": torch.bfloat16, "function": double, "deque": deque([1, 2]), "device": torch.device("cpu"),
    "object": Unknown(), "nested": {"a": [1, (2.0, None)], "b": np.float32(0.5)}, "tensor": torch.tensor(0.5),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_A_GROUP)
@on_ranks(2, assert_same_on_all_ranks)
def test_settings_of_any_type_can_be_wrapped_and_trained_with(kind) -> State:
    loop = Loop("with_bagua", mlp, lambda own: torch.optim.SGD([{"params": own, "own": OF_A_GROUP[kind]}], lr=0.1))
    loop.train(3)
    assert loop.optimizer.param_groups[0]["own"] == OF_A_GROUP[kind]
    return snapshot(loop.model)


@on_ranks(2)
def test_settings_that_cannot_be_sent_are_compared_by_name():
    model = mlp()
    kind = torch.bfloat16 if bagua.comm.get_rank() else torch.float16
    optimizer = torch.optim.SGD([{"params": model.parameters(), "kind": kind}], lr=0.1)
    with pytest.raises(CollectiveMismatchError, match=r"parameter group 0, kind: torch\.float16"):
        by_with_bagua(model, optimizer)


def test_tensors_that_would_be_left_out_are_an_error_that_names_where_they_are(thread_ranks):
    def wrap() -> str:
        model = mlp()
        optimizer = sgd(model.parameters())
        if bagua.comm.get_rank() == 0:
            optimizer.state[model[0].bias]["history"] = deque([torch.ones(16)])
        with pytest.raises(BaguaError) as caught:
            broadcast_optimizer_state([optimizer])
        assert isinstance(caught.value, CollectiveMismatchError if bagua.comm.get_rank() else ConfigurationError)
        return str(caught.value)

    assert "optimizer 0 (SGD), state of parameter 1, history cannot be sent" in thread_ranks(2, wrap)[0]
