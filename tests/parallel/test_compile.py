"""``torch.compile``: compile, then wrap; nothing is compiled again as steps go by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    mlp,
    reference,
    sgd,
)
from tests.parallel.wrapping import WRAPS, Loop


class OwnForward(nn.Module):
    """Dynamo compiles frames of user code only; ``nn.Sequential`` alone has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0
        torch._dynamo.reset()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def _train_compiled(wrap: str, in_place: bool) -> tuple[State, int]:
    """The trained model, and how often it was compiled after the third step."""
    backend = Counting()

    def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        if in_place:
            model.compile(backend=backend)
        return WRAPS[wrap](model if in_place else torch.compile(model, backend=backend), optimizer)

    loop = Loop(compiled, OwnForward)
    loop.train(3)
    before = backend.graphs
    assert before > 0, "this test can fail"
    return loop.train(6), backend.graphs - before


def _export() -> None:
    """A wrapped model is exported, strictly or not, and trains on as before."""
    loop = Loop("with_bagua", OwnForward)
    loop.train()
    inputs = (torch.ones(1, 8),)
    for strict in (True, False):
        exported = torch.export.export(loop.wrapped, inputs, strict=strict).module()
        assert_close({"output": exported(*inputs)}, {"output": loop.model(*inputs)})
    loop.train()
    assert loop.wrapped.bagua_step == 2


def _graphs_of_the_optimizer(wrap: bool) -> int:
    backend = Counting()
    loop = Loop("with_bagua" if wrap else lambda model, _: model, OwnForward)
    step = torch.compile(loop.optimizer.step, backend=backend)
    for _ in range(4):
        loop.optimizer.zero_grad()
        loop.backward()
        with warnings.catch_warnings():  # Of torch, about its own ways to compile.
            warnings.simplefilter("ignore", DeprecationWarning)
            step()
    return backend.graphs


def _train_every_way() -> dict[str, tuple[State, int]]:
    # In one go: torch._dynamo takes seconds to import.
    _export()
    assert _graphs_of_the_optimizer(True) == _graphs_of_the_optimizer(False) > 0
    return {f"{wrap}, in place: {in_place}": _train_compiled(wrap, in_place) for wrap in WRAPS for in_place in (0, 1)}


def test_compiled_models_train_alike_and_are_compiled_once(process_ranks):
    first, second = process_ranks(2, _train_every_way)
    expected = reference(OwnForward(), sgd, 2, range(9))
    for way, (state, compiled_again) in first.items():
        assert compiled_again == second[way][1] == 0, way
        assert_same_on_all_ranks([state, second[way][0]])
        assert_close(state, expected)
