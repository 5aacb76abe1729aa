"""``torch.compile``: compile, then wrap; nothing is compiled again as steps go by."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bagua.comm
from tests.harness import (
    State,
    assert_close,
    assert_same_on_all_ranks,
    loss_of,
    mlp,
    reference,
    sgd,
    snapshot,
    train_steps,
)
from tests.parallel.wrapping import WRAPS


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
    model = OwnForward()
    optimizer = sgd(model.parameters())
    if in_place:
        model.compile(backend=backend)
    compiled = model if in_place else torch.compile(model, backend=backend)
    wrapped = WRAPS[wrap](compiled, optimizer)
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(3))
    before = backend.graphs
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(3, 9))
    assert before > 0, "this test can fail"
    return snapshot(model), backend.graphs - before


def _export() -> None:
    """A wrapped model is exported, strictly or not, and trains on as before."""
    model = OwnForward()
    optimizer = sgd(model.parameters())
    wrapped = WRAPS["with_bagua"](model, optimizer)
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(1))
    inputs = (torch.ones(1, 8),)
    for strict in (True, False):
        assert_close(
            {"output": torch.export.export(wrapped, inputs, strict=strict).module()(*inputs)},
            {"output": model(*inputs)},
        )
    train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(1, 2))
    assert wrapped.bagua_step == 2


def _graphs_of_the_optimizer(wrap: bool) -> int:
    backend = Counting()
    model = OwnForward()
    optimizer = sgd(model.parameters())
    wrapped = WRAPS["with_bagua"](model, optimizer) if wrap else model
    step = torch.compile(optimizer.step, backend=backend)
    for number in range(4):
        optimizer.zero_grad()
        loss_of(wrapped, bagua.comm.get_rank(), number).backward()
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
