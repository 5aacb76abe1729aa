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


@pytest.mark.parametrize(("own", "times"), [(True, 0), (False, 1)])
def test_an_optimizer_of_another_model_is_told(thread_ranks, caplog, own, times):
    def wrap() -> None:
        model, other = mlp(), mlp()
        bagua.with_bagua(model, [sgd(model.parameters()), sgd((model if own else other).parameters())])

    with caplog.at_level(logging.WARNING, "bagua"):
        thread_ranks(2, wrap)
    assert caplog.text.count("optimizer 1 (SGD) steps no parameter of this model") == times


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


class Scripted(torch.jit.ScriptModule):
    pass


LAYER = torch.nn.Linear(2, 1)
SGD = sgd(LAYER.parameters())
ADAM = torch.optim.AdamW(LAYER.parameters())
SWAPPED = r"swapped.*Call with_bagua\(model, optimizer, "
NO_OPTIMIZER = r"no optimizer .*seen Linear, then \w+\)\. Call with_bagua\("
QADAM = r"seen \['AdamW'\]\)\. Build QAdamOptimizer\(model\.parameters\(\)\)"
MISTAKES = {
    "swapped": (lambda: wrapped(SGD, LAYER, "bytegrad"), InvalidTypeError, SWAPPED),
    "swapped, in a list": (lambda: wrapped([SGD], LAYER, "bytegrad"), InvalidTypeError, SWAPPED),
    "a name for the optimizer": (lambda: wrapped(LAYER, "bytegrad"), InvalidTypeError, NO_OPTIMIZER),
    "an algorithm for it": (lambda: wrapped(LAYER, Algorithm.init("bytegrad")), InvalidTypeError, NO_OPTIMIZER),
    "a model for it": (lambda: wrapped(LAYER, torch.nn.Sequential(LAYER)), InvalidTypeError, NO_OPTIMIZER),
    "another optimizer": (lambda: wrapped(LAYER, ADAM, "qadam"), ConfigurationError, QADAM),
    "a large number": (
        lambda: Algorithm.init("top_k", ratio=2),
        ConfigurationError,
        "^ratio must be a number above 0 and at most 1, not 2$",
    ),
    "a module inside": (
        lambda: wrapped(torch.nn.Linear(2, 1), [], "bytegrad").module,
        AttributeError,
        "'Linear' object has no attribute 'module'",
    ),
    "scripted": (lambda: wrapped(Scripted(), [], "bytegrad"), ConfigurationError, "scripted"),
}


def wrapped(model, optimizer, *algorithm):
    return bagua.with_bagua(model, optimizer, *algorithm, process_group=solo_group())


@pytest.mark.parametrize("name", MISTAKES)
def test_what_the_error_says(name):
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call()
