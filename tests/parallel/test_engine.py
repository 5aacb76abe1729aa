"""The engine by itself: who listens to a parameter, and what counts as a change of the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.errors import ConfigurationError, InvalidTensorError
from bagua.parallel import OverlappingWrapper
from bagua.parallel.registration import Registration
from bagua.testing.training import assert_same_on_all_ranks, mlp, sgd, snapshot, train_steps

pytestmark = pytest.mark.threads


def test_models_that_share_some_parameters_cannot_both_be_wrapped(thread_ranks):
    def check() -> None:
        shared = nn.Linear(4, 4)
        first = nn.Sequential(shared, nn.Linear(4, 2))
        kept = OverlappingWrapper(first, sgd(first.parameters()))
        second = nn.Sequential(shared, nn.Linear(4, 3))
        with pytest.raises(ConfigurationError, match=r"0\.weight is exchanged by the engine of another model"):
            OverlappingWrapper(second, sgd(second.parameters()))
        assert shared.weight._post_accumulate_grad_hooks, "the first model lost its hooks"
        del kept

    thread_ranks(2, check)


def test_wrapping_the_same_module_anew_replaces_the_earlier_engine(thread_ranks):
    def train() -> dict[str, torch.Tensor]:
        rank = bagua.comm.get_rank()
        model = mlp()
        optimizer = sgd(model.parameters())
        earlier = OverlappingWrapper(model, optimizer)
        train_steps(earlier, optimizer, rank, range(2))
        wrapped = OverlappingWrapper(model, optimizer)
        train_steps(wrapped, optimizer, rank, range(2, 5))
        assert all(len(parameter._post_accumulate_grad_hooks) == 1 for parameter in model.parameters())
        assert earlier.reducer.step == 2
        assert wrapped.reducer.step == 3
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(2, train))


def test_a_parameter_that_was_replaced_unfrozen_added_or_moved_is_a_difference():
    def replace(model: nn.Module) -> None:
        model[0].weight = nn.Parameter(torch.zeros(16, 8))

    def unfreeze(model: nn.Module) -> None:
        model[2].bias.requires_grad_(True)

    def add(model: nn.Module) -> None:
        model.append(nn.Linear(4, 4))

    def convert(model: nn.Module) -> None:
        model.double()

    def move(model: nn.Module) -> None:
        model[0].bias.data = model[0].bias.data.clone()

    expected = {replace: r"0.weight", unfreeze: r"2.bias", add: "added", convert: "0.weight", move: "0.bias"}
    for change, told in expected.items():
        model = mlp()
        model[2].bias.requires_grad_(False)
        registration = Registration(model)
        assert registration.difference() is None
        change(model)
        assert told in str(registration.difference()), change.__name__


def test_submodules_without_parameters_may_come_and_go():
    model = mlp()
    registration = Registration(model)
    model.append(nn.Identity())
    assert registration.difference() is None
    model[0].weight = nn.Parameter(torch.zeros(16, 8))
    assert registration.difference() is not None


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.LazyLinear(3), "no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "no memory"),
        (lambda: nn.Embedding(4, 2, sparse=True), "sparse gradients"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameters_that_cannot_be_put_into_a_bucket_are_named(make, problem):
    with pytest.raises(InvalidTensorError, match=f"weight .*{problem}"):
        Registration(make())
