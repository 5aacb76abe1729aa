"""What counts as a step: one of an optimizer after a backward pass, whatever was called for the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.errors import ConfigurationError
from tests.harness import State, assert_close, assert_same_on_all_ranks, batch, loss_of, mlp, sgd, snapshot
from tests.parallel.test_changes import ALGORITHMS, OPTIONS, optimizer_maker
from tests.parallel.wrapping import Loop, by_with_bagua, on_ranks

BY_WEIGHTS = ["local_sgd", "slowmo", "diloco", "sparse_loco", "decentralized", "low_precision_decentralized"]
STEPS = 8


class Heads(nn.Module):
    """The head that is registered last is trained later, if ever."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.last = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(inputs))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(self.first(self.body(inputs)), targets)


def by_a_method(model: Any, rank: int, step: int) -> None:
    model.loss(rank, step).backward()


def by_parts(model: Any, rank: int, step: int) -> None:
    inputs, targets = batch(rank, step)
    nn.functional.mse_loss(model.first(model.body(inputs)), targets).backward()


def by_assigning(model: Any, rank: int, step: int) -> None:
    parameters = [*model.body.parameters(), *model.first.parameters()]
    for one, gradient in zip(parameters, torch.autograd.grad(model.loss(rank, step), parameters), strict=True):
        one.grad = gradient


class Steps(Loop):
    """Each of its steps makes gradients in some way."""

    def __init__(self, name: str, way: Callable[..., None] = by_a_method) -> None:
        algorithm, self.way = Algorithm.init(name, **OPTIONS.get(name, {})), way
        options = {"algorithm": algorithm, "find_unused_parameters": True}
        super().__init__("with_bagua", constant_heads, optimizer_maker(algorithm), **options)

    def backward(self) -> None:
        self.step += 1
        self.way(self.model, self.rank, self.step - 1)


def constant_heads() -> nn.Module:
    model = Heads()
    for parameter in model.parameters():  # Threads share the generator.
        nn.init.constant_(parameter, 0.1)
    return model


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, way) for name in ALGORITHMS for way in (by_a_method, by_parts)),
     *((name, by_assigning) for name in BY_WEIGHTS)],
)  # fmt: skip
@on_ranks(2, assert_same_on_all_ranks)
def test_every_step_of_an_optimizer_counts(name, way: Callable[..., None]) -> State:
    loop = Steps(name, way)
    state = loop.train(STEPS)
    assert loop.wrapped.bagua_step == STEPS
    if name in ("local_sgd", "slowmo", "diloco", "sparse_loco"):
        return state  # The last exchange was due after the last step.
    loop.wrapped.bagua_finish()
    return snapshot(loop.model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco", "gradient_allreduce"])
@pytest.mark.parametrize("trained", [["first"], ["last"], ["first", "last"]])
@on_ranks(2, assert_same_on_all_ranks)
def test_parts_of_a_container_train_in_turns(name, trained) -> State:
    """As the two networks of a GAN, which have an optimizer each."""
    rank = bagua.comm.get_rank()
    parts = nn.ModuleDict({"first": mlp(1), "last": mlp(2)})
    optimizers = {key: sgd(part.parameters()) for key, part in parts.items()}
    algorithm = Algorithm.init(name, **OPTIONS.get(name, {}))
    model: Any = by_with_bagua(parts, list(optimizers.values()), algorithm=algorithm, find_unused_parameters=True)
    for step in range(STEPS):
        for key in trained:
            optimizers[key].zero_grad()
            inputs, targets = batch(rank, step)
            nn.functional.mse_loss(parts[key](inputs), targets).backward()
            optimizers[key].step()
    assert model.bagua_step == STEPS * len(trained)
    return snapshot(model)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
@on_ranks(2, assert_same_on_all_ranks)
def test_an_update_that_one_rank_skips_is_a_step_also_by_a_method(name) -> State:
    loop = Steps(name)
    for step in range(STEPS):
        loop.optimizer.zero_grad()
        loop.backward()
        if loop.rank or step:  # As a GradScaler after an overflow.
            loop.optimizer.step()
        else:
            loop.model.first.weight.grad.fill_(torch.inf)
    assert loop.wrapped.bagua_step == STEPS
    return snapshot(loop.model)


@on_ranks(2)
def test_a_loss_that_is_a_method_stays_inside_no_sync():
    loop = Steps("gradient_allreduce")
    loop.train()
    calls = bagua.comm.stats()["allreduce"].calls
    with loop.wrapped.no_sync():
        loop.backward()
    assert (bagua.comm.stats()["allreduce"].calls, loop.wrapped.bagua_step) == (calls, 1)


@pytest.mark.parametrize("times", [1, 3])
def test_gradients_that_were_not_exchanged_are_told_at_once(thread_ranks, caplog, times):
    def train() -> None:
        Steps("gradient_allreduce", by_assigning).train(times)

    thread_ranks(2, train)
    assert caplog.text.count("optimizer 0 (SGD) steps with gradients that no backward pass has brought") == 1


def test_steps_with_gradients_that_came_are_not_told_of(thread_ranks, caplog):
    def train() -> None:
        loop = Steps("gradient_allreduce")
        for _ in range(3):
            loop.optimizer.zero_grad()
            with loop.wrapped.no_sync():
                loop.backward()
            loop.backward()
            loop.optimizer.step()

    thread_ranks(2, train)
    assert "no backward pass" not in caplog.text


@on_ranks(2)
def test_a_change_that_no_forward_pass_could_take_in_is_an_error():
    loop = Steps("gradient_allreduce")
    loop.train()
    loop.model.first.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ConfigurationError, match=r"first\.weight is another tensor now.*without a forward pass"):
        loop.backward()


# Sharpness-aware minimization: each rank steps up its own gradient, and down that of all.


@contextlib.contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """A little further uphill than the weights were, and are again afterwards."""
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.grad, alpha=0.05)
    yield
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), old, strict=True):
            parameter.copy_(before)


def _sharpness_aware() -> State:
    """What two ranks come to, on one."""
    model = mlp()
    optimizer = sgd(model.parameters())
    for step in range(5):
        total: list[torch.Tensor] = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            with perturbed(model):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
            for mean, parameter in zip(total, model.parameters(), strict=True):
                mean.add_(parameter.grad, alpha=0.5)
        for mean, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = mean
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("check_every", [0, 1, None])
@pytest.mark.parametrize("given", [True, False], ids=["with the optimizer", "without"])
def test_weights_may_differ_until_the_optimizer_has_stepped(thread_ranks, check_every, given):
    def train() -> State:
        rank, model = bagua.comm.get_rank(), mlp()
        optimizer = sgd(model.parameters())
        wrapped: Any = by_with_bagua(model, [optimizer] if given else [], check_every=check_every)
        for step in range(5):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, rank, step).backward()
            with perturbed(model):
                optimizer.zero_grad()
                loss_of(wrapped, rank, step).backward()
            optimizer.step()
        return snapshot(model)

    states = thread_ranks(2, train)
    assert_same_on_all_ranks(states)
    assert_close(states[0], _sharpness_aware())


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "local_sgd"])
@on_ranks(1)
def test_steps_of_one_rank_alone_count(name):
    loop = Steps(name)
    loop.train(3)
    assert loop.wrapped.bagua_step == 3
