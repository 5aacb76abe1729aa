"""Layers, optimizers and helpers of torch that look closely at parameters, gradients or modules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.errors import ConfigurationError
from tests.harness import (
    Losses,
    OptimizerMaker,
    State,
    assert_same_on_all_ranks,
    batch,
    gradients,
    loss_of,
    mean_gradients,
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
    wrapped_for_rank,
)

pytestmark = pytest.mark.threads


def _check(
    thread_ranks: Callable[..., list[State]],
    make: Callable[[], nn.Module],
    losses: Losses = loss_of,
    make_optimizer: OptimizerMaker = sgd,
) -> None:
    """Compare with one process, through every way in."""
    for wrap in WRAPS.values():
        check_training(thread_ranks, make, losses, make_optimizer, wrap=wrap)


class _Sequence(nn.Module):
    """Turns a batch of 8 features into 4 steps of 2, runs a layer on them, and returns 4 numbers."""

    def __init__(self, make: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        with seeded():
            self.layer, self.last = make(), nn.Linear(4 * width, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.layer(inputs.view(6, 4, 2))
        return self.last((output[0] if isinstance(output, tuple) else output).flatten(1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: _Sequence(lambda: nn.LSTM(2, 3, num_layers=2, batch_first=True), 3),
    "gru": lambda: _Sequence(lambda: nn.GRU(2, 3, batch_first=True, bidirectional=True), 6),
    "transformer": lambda: _Sequence(
        lambda: nn.TransformerEncoderLayer(2, 1, dim_feedforward=8, dropout=0.0, batch_first=True), 2
    ),
    "weight norm": lambda: _Sequence(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), 3),
    "orthogonal": lambda: _Sequence(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)), 2),
    "layer norm": lambda: _Sequence(lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4)), 4),
    "group norm": lambda: _Sequence(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.PReLU(), nn.Linear(2, 3)), 3),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers(thread_ranks, layer):
    _check(thread_ranks, LAYERS[layer])


OPTIMIZERS: dict[str, OptimizerMaker] = {
    "fused adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.001, centered=True),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(thread_ranks, optimizer):
    _check(thread_ranks, mlp, make_optimizer=OPTIMIZERS[optimizer])


def test_an_output_that_is_changed_in_place(thread_ranks):
    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(model(inputs).mul_(2).relu_(), targets)

    _check(thread_ranks, mlp, losses)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_of_modules(thread_ranks):
    def make() -> nn.Module:
        model = mlp()
        model.register_forward_hook(lambda module, inputs, output: output * 2)
        model[2].register_full_backward_hook(lambda module, before, after: tuple(g * 3 for g in before))
        model.register_full_backward_hook(lambda module, before, after: None)
        return model

    _check(thread_ranks, make)


def test_ranks_that_run_their_layers_in_another_order(thread_ranks):
    """Gradients then appear in another order, too; buckets follow that of rank 0."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with seeded():
                self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, inputs: torch.Tensor, order: str) -> torch.Tensor:
            left, right = (self.left, self.right) if order == "left first" else (self.right, self.left)
            return left(inputs).tanh() * right(inputs)

    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        return nn.functional.mse_loss(model(inputs, "left first" if rank == 0 else "right first"), targets)

    check_training(thread_ranks, Branches, losses, bucket_bytes=1)


def test_unscaling_and_clipping_with_a_scaler(thread_ranks):
    def train() -> State:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        rank, model, optimizer, wrapped = wrapped_for_rank(grad_scaler=scaler)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(wrapped, rank, step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
        return snapshot(model)

    results = thread_ranks(2, train)
    expected = mlp()
    optimizer = sgd(expected.parameters())
    for step in range(3):
        mean_gradients(expected, 2, lambda model, rank, step=step: loss_of(model, rank, step))
        nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        optimizer.step()
    assert_trained(results, snapshot(expected))


def test_anomaly_detection(thread_ranks):
    def train() -> State:
        model = mlp()
        wrapped = by_bagua_init(model, [])
        for step in range(2):
            model.zero_grad()
            loss_of(wrapped, bagua.comm.get_rank(), step).backward()
        return gradients(model)

    with torch.autograd.set_detect_anomaly(True):  # Of the process, so not in the ranks that are its threads.
        assert_same_on_all_ranks(thread_ranks(2, train))
    assert not torch.is_anomaly_enabled()


@pytest.mark.parametrize("wrap", WRAPS)
def test_functional_calls_of_the_plain_module(thread_ranks, wrap):
    """``torch.func`` on the module inside: parameters are borrowed for the call and come back."""

    def train() -> State:
        rank, model, optimizer, wrapped = wrapped_for_rank(wrap=WRAPS[wrap])
        for step in range(4):
            with torch.no_grad():
                doubled = {name: value * 2 for name, value in model.named_parameters()}
                torch.func.functional_call(model, doubled, (batch(rank, step)[0],))
            train_steps(wrapped, optimizer, rank, [step])
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(), sgd, 2, range(4)))


@pytest.mark.parametrize("wrap", WRAPS)
def test_functional_calls_that_are_differentiated(thread_ranks, wrap):
    """As in meta-learning: the gradient arrives at the parameters through the tensors that took their places."""

    def losses(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        inputs, targets = batch(rank, step)
        plain = getattr(model, "module", model)
        adapted = {name: parameter * 0.9 for name, parameter in plain.named_parameters()}
        return nn.functional.mse_loss(torch.func.functional_call(plain, adapted, (inputs,)), targets)

    check_training(thread_ranks, mlp, losses, wrap=WRAPS[wrap])


def test_parameters_that_two_wrapped_models_share_are_refused(thread_ranks):
    def check() -> None:
        shared = nn.Linear(8, 8)
        first, second = nn.Sequential(shared, nn.Linear(8, 4)), nn.Sequential(shared, nn.Linear(8, 4))
        kept = by_with_bagua(first, [])
        with pytest.raises(ConfigurationError, match=r"0\.weight"):
            by_with_bagua(second, [])
        loss_of(kept, bagua.comm.get_rank(), 0).backward()

    thread_ranks(2, check)


def test_scripted_modules_are_refused_by_with_bagua(thread_ranks):
    class Scripted(torch.jit.ScriptModule):
        pass

    def check() -> None:
        with pytest.raises(ConfigurationError, match="scripted"):
            by_with_bagua(Scripted(), [])

    thread_ranks(1, check)
