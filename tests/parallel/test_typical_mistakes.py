"""What a new user gets wrong, and what the error says; other rows of that table are tested where each belongs."""

from __future__ import annotations

import re

import pytest
import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.comm import get_rank, solo_group
from bagua.errors import CollectiveMismatchError, ConfigurationError
from bagua.testing.training import mlp, sgd

pytestmark = pytest.mark.threads


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
