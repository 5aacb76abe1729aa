"""What happens to gradients in a backward pass: unused parameters, hooks, several models, calls of closures."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import TopKAlgorithm
from bagua.errors import BaguaError, ConfigurationError
from bagua.parallel import with_bagua
from tests.harness import (
    State,
    assert_same_on_all_ranks,
    gradients,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import WRAPS, Branches, Loop, assert_trained, by_bagua_init, by_with_bagua, on_ranks


def branch_loss(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return loss_of(lambda inputs: model(inputs, "left" if rank == 0 else "right"), rank, step)


def test_unused_parameters_are_an_error_that_lists_them_on_every_rank(thread_ranks):
    def train() -> str:
        loop = Loop(make=Branches)
        with pytest.raises(BaguaError, match=r"never\.weight") as caught:
            branch_loss(loop.wrapped, loop.rank).backward()
        return str(caught.value)

    left, right = thread_ranks(2, train)
    assert "right.bias" in left
    assert "left.bias" in right
    assert "find_unused_parameters" in left


class Sides(nn.Module):
    """Two parameters, of which a step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.zeros(64)) for _ in range(2))

    def forward(self, side: str) -> torch.Tensor:
        return (self.left * torch.arange(1.0, 65.0)).sum() if side == "left" else (self.right * 0.0).sum()


@pytest.mark.parametrize("fusion", [True, False])
@on_ranks(2)
def test_what_error_feedback_brings_for_unused_parameters_is_not_lost(fusion):
    """A quarter of what is left is sent in each step, also when nobody uses the parameter any more."""
    model, algorithm = Sides(), TopKAlgorithm(ratio=0.125, warmup_steps=0, density_steps=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = with_bagua(model, optimizer, algorithm, find_unused_parameters=True, do_flatten=fusion)
    for side in ("left", *("right",) * 4):
        optimizer.zero_grad()
        wrapped(side).backward()
        optimizer.step()
    assert (model.left.tolist(), model.left.grad is None) == ([-float(one) for one in range(1, 65)], True)


@pytest.mark.parametrize("wrap", WRAPS)
@on_ranks(2, assert_same_on_all_ranks)
def test_lbfgs_calls_its_closure_several_times_in_a_step(wrap) -> State:
    loop = Loop(wrap, make_optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loss_of(loop.wrapped, loop.rank, loop.step)
        loss.backward()
        mean = loss.detach().clone()
        bagua.comm.allreduce(mean, bagua.comm.ReduceOp.AVG)
        return mean

    for loop.step in range(2):
        loop.optimizer.step(closure)
    return snapshot(loop.model)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@on_ranks(2)
def test_backward_with_create_graph_is_refused():
    loop = Loop()
    with pytest.raises(ConfigurationError, match="create_graph"):
        loop.loss().backward(create_graph=True)


def test_a_gradient_hook_of_the_user_sees_local_gradients(thread_ranks):
    """Hooks on tensors run before the gradient is accumulated, hence before it is exchanged."""

    def train() -> tuple[torch.Tensor, torch.Tensor]:
        loop, seen = Loop(), []
        loop.model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        for _ in range(2):
            loop.model.zero_grad()
            loop.backward()
        return seen[-1], loop.model[0].weight.grad

    (first, mean), (second, _) = thread_ranks(2, train)
    assert not torch.equal(first, second)
    torch.testing.assert_close((first + second) / 2, mean)


def test_a_wrapped_module_inside_another_module(thread_ranks):
    """Only the backbone is wrapped; the head on top of it stays local."""

    def train() -> tuple[State, State]:
        backbone, head = mlp(), nn.Linear(4, 4)
        optimizer = sgd([*backbone.parameters(), *head.parameters()])
        model = nn.Sequential(by_with_bagua(backbone, sgd(backbone.parameters())), head)
        train_steps(model, optimizer, bagua.comm.get_rank(), range(3))
        return snapshot(backbone), snapshot(head)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks([backbone for backbone, _ in results])
    assert not torch.equal(results[0][1]["weight"], results[1][1]["weight"])


def test_several_models_and_optimizers_in_one_process(thread_ranks):
    """Two models trained in turns, one of them with two optimizers, as in adversarial training."""

    def train() -> State:
        rank, first, second = bagua.comm.get_rank(), mlp(1), mlp(2)
        halves, whole = [sgd(first[:2].parameters()), sgd(first[2:].parameters())], sgd(second.parameters())
        one, two = by_with_bagua(first, halves), by_bagua_init(second, whole)
        for step in range(4):
            for optimizer in (*halves, whole):
                optimizer.zero_grad()
            (loss_of(one, rank, step) + loss_of(two, rank, step)).backward()
            for optimizer in (*halves, whole):
                optimizer.step()
        return snapshot(nn.ModuleList([first, second]))

    expected = [reference(mlp(seed), sgd, 2, range(4)) for seed in (1, 2)]
    merged = {f"{number}.{name}": value for number, state in enumerate(expected) for name, value in state.items()}
    assert_trained(thread_ranks(2, train), merged)


@pytest.mark.parametrize("attribute", ["_ddp_params_and_buffers_to_ignore", "_bagua_params_and_buffers_to_ignore"])
def test_ignored_parameters_stay_local(thread_ranks, attribute):
    def make() -> nn.Module:
        model = mlp(seed=bagua.comm.get_rank())
        setattr(model, attribute, ["0.weight"])
        return model

    def train() -> State:
        loop = Loop(make=make)
        loop.backward()
        return snapshot(loop.model) | {f"{name}.grad": one for name, one in gradients(loop.model).items()}

    first, second = thread_ranks(2, train)
    for name in first:
        assert torch.equal(first[name], second[name]) != (name in ("0.weight", "0.weight.grad")), name
