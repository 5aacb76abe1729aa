"""What a new user gets wrong, and what the error says; other rows of that table are tested where each belongs."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.comm import get_rank, solo_group
from bagua.errors import CollectiveMismatchError, ConfigurationError, InvalidTypeError
from tests.harness import mlp, sgd
from tests.parallel.wrapping import on_ranks


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


@on_ranks(2)
def test_a_loss_that_is_not_finite_on_one_rank_reaches_all_as_with_ddp():
    model = mlp()
    wrapped = bagua.with_bagua(model, sgd(model.parameters()))
    (wrapped(torch.randn(2, 8)).sum() * (float("nan") if get_rank() else 1.0)).backward()
    assert all(bool(parameter.grad.isnan().any()) for parameter in model.parameters())


def test_scripted_modules_are_refused():
    class Scripted(torch.jit.ScriptModule):
        pass

    with pytest.raises(ConfigurationError, match="scripted"):
        bagua.with_bagua(Scripted(), [], "bytegrad", solo_group())
