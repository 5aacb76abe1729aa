"""What a new user gets wrong, and what the error says; other rows of that table are tested where each belongs."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.comm import get_rank, solo_group
from bagua.errors import CollectiveMismatchError, ConfigurationError, InvalidTypeError
from tests.harness import assert_close, loss_of, mlp, sgd, snapshot

pytestmark = pytest.mark.threads

Way = Callable[[torch.nn.Module, int], None]


def backward_twice(model: torch.nn.Module, rank: int) -> None:
    loss = loss_of(model, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(model: torch.nn.Module, rank: int) -> None:
    output = model(torch.full((2, 8), rank + 1.0))
    output.sum().backward(retain_graph=True)
    output.square().mean().backward()


def two_batches_without_no_sync(model: torch.nn.Module, rank: int) -> None:
    for number in range(2):
        loss_of(model, rank, number).backward()


def _step_of_plain_torch(way: Way) -> dict[str, torch.Tensor]:
    """One step from the mean of the gradients of two ranks, each computed alone."""
    model = mlp()
    alone = [copy.deepcopy(model) for _ in range(2)]
    for rank, replica in enumerate(alone):
        way(replica, rank)
    for parameter, *others in zip(model.parameters(), *(one.parameters() for one in alone), strict=True):
        parameter.grad = sum(one.grad for one in others) / 2
    sgd(model.parameters()).step()
    return snapshot(model)


@pytest.mark.parametrize("before", [True, False], ids=["optimizer", "optimizer made after wrapping"])
@pytest.mark.parametrize("way", [backward_twice, two_losses, two_batches_without_no_sync])
def test_several_backward_passes_for_one_update_give_the_mean_of_their_sums(thread_ranks, way, before):
    def train() -> dict[str, torch.Tensor]:
        model = mlp(seed=get_rank())
        optimizer = sgd(model.parameters())
        wrapped = bagua.with_bagua(model, optimizer if before else [])
        way(wrapped, get_rank())
        (optimizer if before else sgd(model.parameters())).step()
        return snapshot(model)

    expected = _step_of_plain_torch(way)
    for state in thread_ranks(2, train):
        assert_close(state, expected)


def test_model_and_optimizer_in_the_wrong_order_are_named():
    layer = torch.nn.Linear(2, 1)
    optimizer = sgd(layer.parameters())
    for first in (optimizer, [optimizer]):
        with pytest.raises(InvalidTypeError, match=r"swapped.*Call with_bagua\(model, optimizer, "):
            bagua.with_bagua(first, layer, "bytegrad", solo_group())


@pytest.mark.parametrize("second", ["bytegrad", Algorithm.init("bytegrad"), torch.nn.Sequential(torch.nn.Linear(2, 1))])
def test_something_else_in_the_place_of_the_optimizer_shows_the_order(second):
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(InvalidTypeError, match=r"no optimizer .*seen Linear, then \w+\)\. Call with_bagua\("):
        bagua.with_bagua(layer, second)


@pytest.mark.parametrize(("own", "times"), [(True, 0), (False, 1)])
def test_an_optimizer_of_another_model_is_told(thread_ranks, caplog, own, times):
    def wrap() -> None:
        model, other = mlp(), mlp()
        bagua.with_bagua(model, [sgd(model.parameters()), sgd((model if own else other).parameters())])

    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, wrap)
    assert caplog.text.count("optimizer 1 (SGD) steps no parameter of this model") == times


def test_qadam_with_another_optimizer_names_the_one_to_build():
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=r"seen \['AdamW'\]\)\. Build QAdamOptimizer\(model\.parameters\(\)\)"):
        bagua.with_bagua(layer, torch.optim.AdamW(layer.parameters()), "qadam", solo_group())


def test_a_number_that_is_too_large_is_told_in_one_sentence():
    with pytest.raises(ConfigurationError) as caught:
        Algorithm.init("top_k", ratio=2)
    assert str(caught.value) == "ratio must be a number above 0 and at most 1, not 2"


def test_a_wrapped_model_is_the_model_and_has_no_module_inside():
    layer = torch.nn.Linear(2, 1)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'module'"):
        _ = bagua.with_bagua(layer, [], "bytegrad", solo_group()).module


def test_another_model_on_each_rank_names_the_first_parameter_and_both_shapes(thread_ranks):
    def wrap() -> str:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8 + get_rank()))
        with pytest.raises(CollectiveMismatchError) as caught:
            bagua.with_bagua(model, sgd(model.parameters()))
        return str(caught.value)

    for told in thread_ranks(2, wrap):
        assert told.startswith("ranks have different models")
        assert re.search(r"0\.weight: shape \[9, 4\].*0\.weight: shape \[8, 4\]", told) or re.search(
            r"0\.weight: shape \[8, 4\].*0\.weight: shape \[9, 4\]", told
        )


def test_an_unused_parameter_is_named_with_the_ranks_and_the_cure(thread_ranks):
    def train() -> str:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
        model.forward = model[0].forward
        wrapped = bagua.with_bagua(model, sgd(model.parameters()))
        with pytest.raises(ConfigurationError) as caught:
            wrapped(torch.ones(1, 2)).sum().backward()
        return str(caught.value)

    for told in thread_ranks(2, train):
        assert "1.weight" in told
        assert "find_unused_parameters" in told


def test_a_loss_that_is_not_finite_on_one_rank_reaches_all_as_with_ddp(thread_ranks):
    def train() -> bool:
        model = mlp()
        wrapped = bagua.with_bagua(model, sgd(model.parameters()))
        (wrapped(torch.randn(2, 8)).sum() * (float("nan") if get_rank() else 1.0)).backward()
        return all(bool(parameter.grad.isnan().any()) for parameter in model.parameters())

    assert thread_ranks(2, train) == [True, True]
