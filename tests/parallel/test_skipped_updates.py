"""An update that a ``GradScaler`` skips on one rank keeps nobody waiting, also if no forward pass follows there."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import DifferenceMix, Flight, LowPrecisionDecentralizedAlgorithm
from bagua.comm import ProcessGroup
from bagua.engine.gradients import has_finite_gradients
from bagua.errors import ConfigurationError
from bagua.parallel import with_bagua
from tests.harness import State, batch, loss_of, mlp, sgd, snapshot
from tests.parallel.test_steps import perturbed
from tests.parallel.wrapping import Loop, on_ranks

STEPS = 3
#: The rank whose gradients overflow in the last step.
OVERFLOWS = 1


def _train(optimizers_per_model: int, finish: str) -> tuple[State, State, float]:
    """Weights, what neighbours know of them, and the scale at the end."""
    rank, model = bagua.comm.get_rank(), mlp()
    parts = [model] if optimizers_per_model == 1 else [model[0], nn.ModuleList(model[1:])]
    optimizers = [sgd(part.parameters()) for part in parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrapped = with_bagua(model, optimizers, "low_precision_decentralized", bucket_bytes=1000)
    for step in range(STEPS):
        if rank == OVERFLOWS and step == STEPS - 1:
            model[0].weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
        model.zero_grad()
        scaler.scale(loss_of(wrapped, rank, step)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    if finish == "something else together":
        bagua.comm.get_default_group().global_communicator.barrier()
    weights = snapshot(model) if finish == "something else together" else wrapped.state_dict()
    known = wrapped.bagua_state_dict()[f"rank{rank}"]["parameters"]
    return weights, {name: state["estimate"] for name, state in known.items()}, scaler.get_scale()


@pytest.mark.parametrize("optimizers_per_model", [1, 2])
def test_ranks_leave_training_for_something_else_together(thread_ranks, optimizers_per_model):
    left = thread_ranks(2, _train, optimizers_per_model, "something else together", timeout_s=20)
    asked = thread_ranks(2, _train, optimizers_per_model, "state_dict")
    assert [scale for *_, scale in left] == [4.0, 2.0], "one update was skipped, on one rank"
    for rank, (weights, known, _) in enumerate(left):
        for name, weight in weights.items():
            assert torch.equal(weight, known[name]), "the last thing that changed weights is the exchange"
            assert torch.equal(weight, asked[rank][0][name])


class Unusual(nn.Module):
    """Has a parameter without elements, and an optimizer that also has a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.nothing = mlp(), nn.Parameter(torch.empty(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.body(inputs) + self.nothing.sum()


@on_ranks(2)
def test_gradients_without_elements_and_sparse_ones_are_looked_at_too():
    table = nn.Embedding(4, 2, sparse=True)

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, step) + table(torch.tensor([rank])).sum()

    def optimizer_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd([*parameters, *table.parameters()])

    loop = Loop("with_bagua", Unusual, optimizer_of, loss, algorithm="low_precision_decentralized")
    loop.train(STEPS)
    assert all(weight.isfinite().all() for weight in loop.wrapped.state_dict().values())


@pytest.mark.parametrize(
    ("value", "finite"), [(1.0, True), (3e38, True), (torch.inf, False), (-torch.inf, False), (torch.nan, False)]
)
def test_gradients_whose_norm_overflows_are_finite_all_the_same(value, finite):
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    parameters[0].grad[1:] = value
    assert has_finite_gradients(sgd(parameters)) is finite


def _sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many exchanges each rank has started, of whatever is sent after the optimizers."""
    counted: Counter[int] = Counter()
    run = DifferenceMix.run

    def count(self: DifferenceMix, flight: Flight, group: ProcessGroup) -> None:
        counted[group.rank] += 1
        run(self, flight, group)

    monkeypatch.setattr(DifferenceMix, "run", count)
    return counted


@pytest.mark.parametrize("interval", [1, 2, 3])
def test_what_is_owed_survives_further_backward_passes(thread_ranks, monkeypatch, interval):
    """Two losses, one update: each backward pass is a step, and each update pays what the steps before it owe."""
    counted = _sent(monkeypatch)

    def train() -> None:
        algorithm = LowPrecisionDecentralizedAlgorithm(communication_interval=interval)
        loop = Loop("with_bagua", algorithm=algorithm, bucket_bytes=10**6)
        for step in range(6):
            loop.optimizer.zero_grad()
            output = loop.wrapped(batch(loop.rank, step)[0])
            output.sum().backward(retain_graph=True)
            output.square().sum().backward()
            loop.optimizer.step()
        snapshot(loop.model)

    thread_ranks(2, train)
    due = [t for t in range(1, 13) if (t - 1) % interval == 0]
    assert counted == {rank: len({(t - 1) // 2 for t in due}) for rank in (0, 1)}


def _climb_and_descend(synchronized: bool) -> State:
    """Sharpness-aware minimization: the gradient is that of weights a little further uphill."""
    loop = Loop("with_bagua", algorithm="low_precision_decentralized")
    for step in range(4):
        loop.optimizer.zero_grad()
        with contextlib.nullcontext() if synchronized else loop.wrapped.no_sync():
            loss_of(loop.wrapped, loop.rank, step).backward()
        with perturbed(loop.model):
            loop.optimizer.zero_grad()
            loss_of(loop.wrapped, loop.rank, step).backward()
        loop.optimizer.step()
    return snapshot(loop.model)


def test_weights_that_were_changed_by_no_optimizer_are_not_sent(thread_ranks):
    with pytest.raises(ConfigurationError, match=r"weights were changed.*no_sync"):
        thread_ranks(2, _climb_and_descend, True)
    for state in thread_ranks(2, _climb_and_descend, False):
        assert all(value.isfinite().all() for value in state.values())


@on_ranks(2)
def test_weights_may_be_loaded_in_place_of_an_update():
    loop = Loop("with_bagua", algorithm="low_precision_decentralized")
    before, started = snapshot(loop.wrapped), []
    for step in range(4):
        loop.optimizer.zero_grad()
        loss_of(loop.wrapped, loop.rank, step).backward()
        if step == 2:
            loop.model.load_state_dict(before)
        else:
            loop.optimizer.step()
        started.append(all(torch.equal(one, before[name]) for name, one in loop.model.named_parameters()))
    assert started == [False, False, True, False]
