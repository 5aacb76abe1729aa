"""Uncommon models, outputs and training loops that are legal with plain torch, and therefore here."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import Algorithm
from bagua.errors import ConfigurationError
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    gradients,
    loss_of,
    mlp,
    reference,
    seeded,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import (
    WRAPS,
    assert_trained,
    by_bagua_init,
    by_with_bagua,
    check_training,
    gradients_of_two,
    wrapped_for_rank,
)

pytestmark = pytest.mark.threads


# What a model may return.


@dataclasses.dataclass
class _Output:
    value: torch.Tensor
    note: str = "a dataclass"


class _Named(NamedTuple):
    note: str
    value: torch.Tensor


class _Plain:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.itself = self


class _Mapping(OrderedDict):
    """Like the ``ModelOutput`` of transformers: a dictionary whose items are attributes, too."""


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (_Output, lambda output: output.value),
    "named tuple": (lambda value: _Named("", value), lambda output: output.value),
    "nested": (lambda value: {"a": [None, (value, 3)], "b": "text"}, lambda output: output["a"][1][0]),
    "mapping": (lambda value: _Mapping(value=value), lambda output: output["value"]),
    "object": (_Plain, lambda output: output.value),
    "function": (lambda value: lambda: value, lambda output: output()),
    "several": (lambda value: (value, value * 2, value.detach()), lambda output: output[0] + output[1]),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_of_any_form(thread_ranks, kind):
    pack, unpack = OUTPUTS[kind]

    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, inputs: torch.Tensor) -> Any:
            return pack(self.layers(inputs))

    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(unpack(model(inputs)), targets)

    check_training(thread_ranks, Packs, losses)


def test_a_model_that_returns_its_loss(thread_ranks):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, inputs: torch.Tensor, *, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(self.layers(inputs), targets)

    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return model(inputs, targets=targets)

    check_training(thread_ranks, Loss, losses)


def test_an_output_that_is_a_parameter(thread_ranks):
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with seeded():
                self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.weight

    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(nn.functional.linear(inputs, model(inputs)), targets)

    check_training(thread_ranks, Returns, losses)


# What a parameter may be.


class _Holds(nn.Module):
    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(parameter) for parameter in parameters)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        total = inputs.sum()
        return sum((parameter * total).abs().sum() for parameter in self.held).expand(6, 4)


def _ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **options)


PARAMETERS = {
    "transposed": lambda: _Holds(torch.arange(12.0).view(3, 4).t(), _ones(2)),
    "without elements": lambda: _Holds(_ones(0), _ones(3), _ones(2, 0)),
    "complex": lambda: _Holds(_ones(3, dtype=torch.complex64), _ones(3)),
    "float64": lambda: _Holds(_ones(3, dtype=torch.float64), _ones(3)),
    "view of a larger tensor": lambda: _Holds(_ones(100)[::7], _ones(3)),
    "channels last": lambda: _Holds(_ones(2, 3, 4, 5).to(memory_format=torch.channels_last), _ones(1)),
}


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("fusion", [True, False])
def test_parameters_of_any_form(thread_ranks, kind, fusion):
    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        # Old versions of torch take the loss of one dtype only.
        return loss_of(lambda inputs: model(inputs).float(), rank, step)

    check_training(thread_ranks, PARAMETERS[kind], losses, fusion=fusion)


# How a loop may train.


@pytest.mark.parametrize("wrap", WRAPS)
def test_lbfgs_calls_its_closure_several_times_in_a_step(thread_ranks, wrap):
    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        wrapped = WRAPS[wrap](model, optimizer)
        for step in range(2):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(wrapped, rank, step)
                loss.backward()
                mean = loss.detach().clone()
                bagua.comm.allreduce(mean, bagua.comm.ReduceOp.AVG)
                return mean

            optimizer.step(closure)
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


def test_a_second_backward_through_a_kept_graph(thread_ranks):
    def train() -> State:
        rank, model, _, wrapped = wrapped_for_rank()
        for step in range(2):
            model.zero_grad()
            loss = loss_of(wrapped, rank, step)
            loss.backward(retain_graph=True)
            loss.backward()
        return gradients(model)

    assert_trained(thread_ranks(2, train), gradients_of_two(lambda m, rank: 2 * loss_of(m, rank, 1)))


def test_gradients_of_inputs_without_a_step(thread_ranks):
    """``torch.autograd.grad``, as for adversarial examples and gradient penalties: no exchange, no confusion."""

    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        for step in range(4):
            inputs, targets = batch(rank, step)
            inputs.requires_grad_(True)
            loss = nn.functional.mse_loss(wrapped(inputs), targets)
            (gradient,) = torch.autograd.grad(loss, inputs, retain_graph=True)
            assert gradient.abs().sum() > 0
            train_steps(wrapped, optimizer, rank, [step])
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(), sgd, 2, range(4)))


def test_a_gradient_penalty(thread_ranks):
    """A loss that contains a gradient: a derivative of a derivative, with the graph kept in between."""

    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        inputs.requires_grad_(True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.pow(2).sum()

    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with seeded():
                self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layers(inputs)

    check_training(thread_ranks, Smooth, losses)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backward_with_create_graph_is_refused(thread_ranks):
    def train() -> None:
        rank, _, _, wrapped = wrapped_for_rank()
        loss = loss_of(wrapped, rank, 0)
        with pytest.raises(ConfigurationError, match="create_graph"):
            loss.backward(create_graph=True)

    thread_ranks(2, train)


def test_backward_on_a_sum_of_outputs_of_several_forwards_in_and_out_of_no_sync(thread_ranks):
    """The forwards decide: one that was not in ``no_sync`` makes the whole backward a step."""

    def train() -> State:
        rank, model, _, wrapped = wrapped_for_rank()
        for step in range(2):
            model.zero_grad()
            with wrapped.no_sync():
                first = loss_of(wrapped, rank, step)
            (first + loss_of(wrapped, rank, step + 10)).backward()
        return gradients(model)

    assert_trained(thread_ranks(2, train), gradients_of_two(lambda m, rank: loss_of(m, rank, 1) + loss_of(m, rank, 11)))


def test_a_wrapped_module_inside_another_module(thread_ranks):
    """Only the backbone is wrapped; the head on top of it stays local."""

    def train() -> tuple[State, State]:
        rank = bagua.comm.get_rank()
        backbone, head = mlp(), nn.Linear(4, 4)
        optimizer = sgd([*backbone.parameters(), *head.parameters()])
        model = nn.Sequential(by_with_bagua(backbone, sgd(backbone.parameters())), head)
        train_steps(model, optimizer, rank, range(3))
        return snapshot(backbone), snapshot(head)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks([backbone for backbone, _ in results])
    assert not torch.equal(results[0][1]["weight"], results[1][1]["weight"])


def test_with_bagua_twice_switches_and_leaves_one_engine(thread_ranks):
    def train() -> tuple[State, int]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        for start in (0, 3):
            by_with_bagua(model, optimizer, algorithm=Algorithm.init("gradient_allreduce"), bucket_bytes=10**6)
            train_steps(model, optimizer, rank, range(start, start + 3))
        before = bagua.comm.stats()["allreduce"].calls
        train_steps(model, optimizer, rank, [6])
        return snapshot(model), bagua.comm.stats()["allreduce"].calls - before

    results = thread_ranks(2, train)
    assert [calls for _, calls in results] == [1, 1]
    assert_same_on_all_ranks([state for state, _ in results])
    assert_close(results[0][0], reference(mlp(), sgd, 2, range(7)))


def test_autocast(thread_ranks):
    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.mse_loss(model(inputs).float(), targets)

    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        for step in range(3):
            optimizer.zero_grad()
            losses(wrapped, rank, step).backward()
            optimizer.step()
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


def test_inference_mode_between_steps(thread_ranks):
    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        for step in range(3):
            with torch.inference_mode():
                wrapped(batch(rank, step)[0])
            train_steps(wrapped, optimizer, rank, [step])
        return snapshot(model)

    results = thread_ranks(2, train)
    assert_close(results[0], reference(mlp(), sgd, 2, range(3)))


def test_a_gradient_hook_of_the_user_sees_local_gradients(thread_ranks):
    """Hooks on tensors run before the gradient is accumulated, hence before it is exchanged."""

    def train() -> tuple[torch.Tensor, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        seen = []
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        wrapped = by_bagua_init(model, sgd(model.parameters()))
        for step in range(2):
            model.zero_grad()
            loss_of(wrapped, rank, step).backward()
        return seen[-1], model[0].weight.grad

    (first, mean), (second, _) = thread_ranks(2, train)
    assert not torch.equal(first, second)
    torch.testing.assert_close((first + second) / 2, mean)


def test_an_optimizer_in_the_backward_pass(thread_ranks):
    """The recipe that steps each parameter in a hook sees gradients that are not averaged yet, or is refused."""

    def train() -> State:
        rank = bagua.comm.get_rank()
        model = mlp()
        wrapped = by_bagua_init(model, [])
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
        for step in range(3):
            model.zero_grad()
            loss_of(wrapped, rank, step).backward()
            for optimizer in optimizers.values():
                optimizer.step()
        return snapshot(model)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks(results)
