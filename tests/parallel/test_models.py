"""Models of every kind: tied, frozen, mixed, ignored, sparse, and those that change while they are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

import bagua.comm
import bagua.torch_api
from bagua.errors import BaguaError, CollectiveMismatchError
from tests.harness import (
    assert_close,
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


class Tied(nn.Module):
    """One weight under two names, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.embed = nn.Linear(8, 8, bias=False)
            self.head = nn.Linear(8, 8, bias=False)
            self.out = nn.Linear(8, 4)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.head(self.embed(inputs)))


class OnTheRoot(nn.Module):
    """Parameters directly on the root module; a scalar among them."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.weight = nn.Parameter(torch.randn(4, 8))
            self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight) * self.scale


class MixedTypes(nn.Module):
    """Three dtypes in one model."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8).double()
            self.third = nn.Linear(8, 4).bfloat16()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(inputs).double()).bfloat16()).float()


class Convolutional(nn.Module):
    """``channels_last`` weights and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        with seeded():
            self.first = nn.Conv2d(2, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.last = nn.Conv2d(8, 4, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(inputs.view(-1, 2, 2, 2)))).flatten(1)


def _frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("make", [Tied, OnTheRoot, _frozen], ids=["tied", "root", "frozen"])
def test_tied_root_level_and_frozen_parameters(thread_ranks, make, wrap):
    def trainable(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd(parameter for parameter in parameters if parameter.requires_grad)

    check_training(thread_ranks, make, make_optimizer=trainable, steps=range(5), wrap=WRAPS[wrap])


def test_mixed_dtypes(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        model = MixedTypes()
        optimizer = sgd(model.parameters())
        wrapped = by_bagua_init(model, optimizer)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(3))
        return snapshot(model)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks(results)
    expected = reference(MixedTypes(), sgd, 2, range(3))
    for name, value in results[0].items():
        tolerance = 5e-2 if value.dtype is torch.bfloat16 else 1e-2
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


def test_channels_last_weights_keep_their_layout(thread_ranks):
    def train() -> tuple[bool, dict[str, torch.Tensor]]:
        model = Convolutional()
        optimizer = sgd(model.parameters())
        wrapped = by_bagua_init(model, optimizer)
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(3))
        kept = model.first.weight.is_contiguous(memory_format=torch.channels_last)
        parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return kept, parameters

    results = thread_ranks(2, train)
    assert all(kept for kept, _ in results)
    assert_same_on_all_ranks([parameters for _, parameters in results])
    expected = reference(Convolutional(), sgd, 2, range(3))
    assert_close(results[0][1], {name: expected[name] for name in results[0][1]})


@pytest.mark.parametrize("attribute", ["_ddp_params_and_buffers_to_ignore", "_bagua_params_and_buffers_to_ignore"])
def test_ignored_parameters_stay_local(thread_ranks, attribute):
    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp(seed=rank)
        setattr(model, attribute, ["0.weight"])
        optimizer = sgd(model.parameters())
        wrapped = by_bagua_init(model, optimizer)
        loss_of(wrapped, rank, 0).backward()
        return snapshot(model) | {f"{name}.grad": gradient for name, gradient in gradients(model).items()}

    first, second = thread_ranks(2, train)
    for name in first:
        local = name in ("0.weight", "0.weight.grad")
        assert torch.equal(first[name], second[name]) != local, name


def test_a_model_whose_gradients_are_sparse_is_refused_when_it_is_wrapped_or_trains(thread_ranks):
    def train() -> str | dict[str, torch.Tensor]:
        with seeded():
            model = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            wrapped = by_bagua_init(model, optimizer)
        except BaguaError as error:
            return str(error)
        wrapped(torch.tensor([bagua.comm.get_rank()])).sum().backward()
        optimizer.step()
        return snapshot(model)

    results = thread_ranks(2, train)
    if isinstance(results[0], str):
        assert all("sparse" in message for message in results)
    else:
        assert_same_on_all_ranks(results)


def test_several_models_and_optimizers_in_one_process(thread_ranks):
    """Two models trained in turns, one of them with two optimizers, as in adversarial training."""

    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        first, second = mlp(1), mlp(2)
        halves = [sgd(first[:2].parameters()), sgd(first[2:].parameters())]
        whole = sgd(second.parameters())
        one = first.with_bagua(halves, bagua.torch_api.algorithms.Algorithm.init("gradient_allreduce"))
        two = by_bagua_init(second, whole)
        for step in range(4):
            for optimizer in (*halves, whole):
                optimizer.zero_grad()
            (loss_of(one, rank, step) + loss_of(two, rank, step)).backward()
            for optimizer in (*halves, whole):
                optimizer.step()
        return {f"first.{k}": v for k, v in snapshot(first).items()} | {
            f"second.{k}": v for k, v in snapshot(second).items()
        }

    results = thread_ranks(2, train)
    assert_same_on_all_ranks(results)
    expected = {f"first.{k}": v for k, v in reference(mlp(1), sgd, 2, range(4)).items()} | {
        f"second.{k}": v for k, v in reference(mlp(2), sgd, 2, range(4)).items()
    }
    assert_close(results[0], expected)


# Models that change.


def _assign(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in mlp(seed=7).state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("wrap", WRAPS)
def test_load_state_dict_assign_keeps_the_model_synchronized(thread_ranks, wrap):
    def train() -> dict[str, torch.Tensor]:
        rank, model, optimizer, wrapped = wrapped_for_rank(wrap=WRAPS[wrap])
        train_steps(wrapped, optimizer, rank, range(2))
        _assign(model)
        optimizer = sgd(model.parameters())  # The old one holds the old parameters.
        train_steps(wrapped, optimizer, rank, range(2, 5))
        return snapshot(model)

    assert_trained(thread_ranks(2, train), reference(mlp(seed=7), sgd, 2, range(2, 5)))


def test_load_state_dict_in_place_is_nothing_special(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = by_bagua_init(model, optimizer)
        train_steps(wrapped, optimizer, rank, range(2))
        wrapped.load_state_dict(mlp(seed=7).state_dict())
        train_steps(wrapped, optimizer, rank, range(2, 5))
        return snapshot(model)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks(results)
    expected = reference(mlp(seed=7), lambda p: torch.optim.SGD(p, lr=0.1), 2, range(2, 5))
    assert_close(results[0], expected)


def test_parameters_unfrozen_during_training_are_synchronized_from_then_on(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank, model, optimizer, wrapped = wrapped_for_rank(_frozen)
        train_steps(wrapped, optimizer, rank, range(3))
        model.requires_grad_(True)
        train_steps(wrapped, optimizer, rank, range(3, 6))
        return snapshot(model)

    results = thread_ranks(2, train)
    assert_same_on_all_ranks(results)
    expected = _frozen()
    optimizer = sgd(expected.parameters())
    for step in range(6):
        if step == 3:
            expected.requires_grad_(True)
        mean_gradients(expected, 2, lambda m, rank, step=step: loss_of(m, rank, step))
        optimizer.step()
    assert_close(results[0], snapshot(expected))


def test_parameters_frozen_during_training_are_no_longer_waited_for(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        train_steps(wrapped, optimizer, rank, range(3))
        model[0].requires_grad_(False)
        train_steps(wrapped, optimizer, rank, range(3, 6))
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


def test_a_change_that_only_one_rank_made_is_an_error_on_every_rank(thread_ranks):
    def train() -> None:
        rank, model, optimizer, wrapped = wrapped_for_rank(_frozen)
        train_steps(wrapped, optimizer, rank, range(2))
        if rank == 1:
            model.requires_grad_(True)
        # Whatever came before had more time: this ends with the timeout of whoever waits for the same change.
        wrapped._bagua_engine.reducer.group.timeout_s = 0.5
        with pytest.raises(BaguaError):
            train_steps(wrapped, optimizer, rank, range(2, 4))

    thread_ranks(2, train)


def test_a_change_of_dtype_is_an_error_or_keeps_the_model_synchronized(thread_ranks):
    def train() -> str | dict[str, torch.Tensor]:
        rank, model, optimizer, wrapped = wrapped_for_rank()
        train_steps(wrapped, optimizer, rank, range(2))
        model.double()
        optimizer = sgd(model.parameters())
        try:
            for step in range(2, 4):
                optimizer.zero_grad()
                inputs, targets = batch(rank, step)
                nn.functional.mse_loss(wrapped(inputs.double()), targets.double()).backward()
                optimizer.step()
        except BaguaError as error:
            return str(error)
        return snapshot(model)

    results = thread_ranks(2, train)
    if isinstance(results[0], str):
        assert all("dtype" in message or "float64" in message for message in results)
    else:
        assert_same_on_all_ranks(results)


# Ranks whose models differ: found out before the first exchange, and named.


def _other_shape() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))


def _other_names() -> nn.Module:
    model = mlp()
    return nn.Sequential(*model[:4], nn.Sequential(model[4]))


def _other_dtype() -> nn.Module:
    model = mlp()
    model[2].to(torch.bfloat16)
    return model


def _other_buffer() -> nn.Module:
    model = mlp()
    model.register_buffer("calls", torch.zeros(3))
    return model


DIFFERENCES: dict[str, tuple[Callable[[], nn.Module], dict[str, object], str]] = {
    "shape": (_other_shape, {}, r"0\.weight"),
    "name": (_other_names, {}, r"4\.(0\.)?weight"),
    "dtype": (_other_dtype, {}, r"2\.weight"),
    "requires_grad": (_frozen, {}, r"0\.weight"),
    "buffer": (_other_buffer, {}, "calls"),
    "bucket_bytes": (mlp, {"bucket_bytes": 77_000}, "bucket"),
    "hierarchical": (mlp, {"hierarchical_reduce": True}, "hierarchical"),
    "delay_reduce": (mlp, {"delay_reduce": True}, "delay_reduce"),
    "fusion": (mlp, {"fusion": False}, "fusion"),
    "find_unused_parameters": (mlp, {"find_unused_parameters": True}, "find_unused_parameters"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("odd", [0, 2], ids=["rank 0 differs", "last rank differs"])
def test_models_that_differ_are_found_before_the_first_exchange(thread_ranks, difference, odd):
    make, options, pattern = DIFFERENCES[difference]

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = make() if rank == odd else mlp()
        before = snapshot(model)
        optimizer = sgd(model.parameters())
        with pytest.raises(CollectiveMismatchError, match=pattern):
            wrapped = by_bagua_init(model, optimizer, **(options if rank == odd else {}))
            loss_of(wrapped, rank, 0).backward()
        assert_same_on_all_ranks([before, snapshot(model)])

    thread_ranks(3, train, hosts=[2, 1])


def test_ranks_that_choose_different_algorithms_are_told(thread_ranks):
    from bagua.algorithms import Algorithm

    def train() -> None:
        rank = bagua.comm.get_rank()
        model = mlp()
        algorithm = Algorithm.init("gradient_allreduce", average=rank == 0)
        with pytest.raises(CollectiveMismatchError, match="average"):
            wrapped = by_with_bagua(model, sgd(model.parameters()), algorithm=algorithm)
            loss_of(wrapped, rank, 0).backward()

    thread_ranks(2, train)
