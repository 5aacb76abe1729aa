"""From each registered algorithm to each other one, in the middle of training."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.algorithms import Algorithm, registry
from bagua.optim import QAdamOptimizer
from bagua.torch_api.distributed import ModelSwitchWrapper
from tests.algorithms.toys import QuickToWarmUp
from tests.harness import (
    OptimizerMaker,
    State,
    adam,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    sgd,
    snapshot,
    train_steps,
)

STEPS = 3


def fitting(optimizer: OptimizerMaker) -> list[str]:
    """Algorithms for this optimizer."""
    kinds = (None, QAdamOptimizer if optimizer is QuickToWarmUp else None)
    return [name for name in registry if registry.get(name).optimizer_class in kinds]


def loss(model: torch.nn.Module, size: int) -> float:
    """Of the data of all ranks."""
    with torch.no_grad():
        return float(sum(loss_of(model, rank, step) for rank in range(size) for step in range(STEPS))) / size


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    tensors = [state[key] for state in optimizer.state.values() for key in sorted(state) if key != "step"]
    return {str(number): tensor.detach().clone() for number, tensor in enumerate(tensors)}


def switch_through(names: list[str], make_optimizer: OptimizerMaker) -> list[tuple[State, State, float, float]]:
    """Train with each; after each switch the weights, the optimizer's state, and the loss before and after."""
    rank, size = bagua.comm.get_rank(), bagua.comm.get_world_size()
    model = mlp(seed=rank)
    optimizer = make_optimizer(model.parameters())
    wrapped = ModelSwitchWrapper(model, optimizer, message_size=1000)
    seen = []
    for name in names:
        before = loss(model, size)
        wrapped.switch_to(Algorithm.init(name))
        seen.append((snapshot(model), optimizer_state(optimizer), before, loss(model, size)))
        train_steps(wrapped, optimizer, rank, range(STEPS))
    return seen


@pytest.mark.parametrize(
    ("size", "make_optimizer"), [(2, sgd), (3, adam), (2, QuickToWarmUp)], ids=["momentum", "adam", "qadam"]
)
def test_training_goes_on_through_all_algorithms_and_back(thread_ranks, size, make_optimizer):
    names = fitting(make_optimizer)
    path = [*names, *reversed(names)]
    results = thread_ranks(size, switch_through, path, make_optimizer)
    for of_ranks in zip(*results, strict=True):
        assert_same_on_all_ranks([weights for weights, *_ in of_ranks])
        assert_same_on_all_ranks([state for _, state, *_ in of_ranks])
    first, *others = results[0]
    for name, (_, _, before, after) in zip(path, others, strict=False):
        consensus = registry.get(name)().ranks_differ
        assert after < 1.1 * before if consensus else after == pytest.approx(before, rel=1e-5), f"a jump after {name}"
    assert others[-1][3] < 0.8 * first[3], "nothing was learned"
    assert others[-1][1], "the optimizer remembers nothing"
