"""Lightning Fabric through our strategy, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import DiLoCoAlgorithm
from bagua.errors import ConfigurationError, UnsupportedAlgorithmException
from bagua.testing import ProcessRanks
from tests.harness import State, assert_same_on_all_ranks, snapshot

pytest.importorskip("lightning.fabric", reason="needs the extra lightning")

from lightning.fabric import Fabric

from bagua.integrations.fabric import BaguaStrategy
from tests.integrations import lightning_runs as runs

pytestmark = pytest.mark.gloo
STEPS = 6
NAMES = ["gradient_allreduce", "power_sgd", "decentralized", "low_precision_decentralized"]


def make_fabric(strategy: Any, **options: Any) -> Any:
    runs.as_lightning_starts_it()
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=2, **options)
    fabric.launch()
    return fabric


def set_up(strategy: Any, **options: Any) -> tuple[Any, Any, Any, nn.Module]:
    fabric = make_fabric(strategy, **options)
    torch.manual_seed(bagua.comm.get_rank())  # Ranks start with different weights: the strategy makes them equal.
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9))
    return fabric, model, optimizer, module


def train(fabric: Any, model: Any, optimizer: Any, steps: range, accumulate: int = 1) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(100 * step + fabric.global_rank)
        inputs = torch.randn(8, 4, generator=random)
        with fabric.no_backward_sync(model, enabled=(step + 1) % accumulate != 0):
            fabric.backward(nn.functional.mse_loss(model(inputs), inputs[:, :1]))
        if (step + 1) % accumulate == 0:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()


def through_both() -> list[tuple[State, State]]:
    found = []
    for options in ({}, {"accumulate": 2}, {"precision": "bf16-mixed"}):
        accumulate = options.pop("accumulate", 1)
        states = []
        for strategy in ("ddp", "bagua"):
            fabric, model, optimizer, module = set_up(strategy, **options)
            train(fabric, model, optimizer, range(STEPS), accumulate)
            states.append(snapshot(module))
        found.append((states[0], states[1]))
    return found


def stop_and_go_on(names: list[str], folder: str) -> list[tuple[State, State]]:
    found = []
    for name in names:
        path = Path(folder) / f"{name}.ckpt"
        fabric, model, optimizer, module = set_up(f"bagua_{name}")
        train(fabric, model, optimizer, range(3))
        fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
        train(fabric, model, optimizer, range(3, STEPS))
        fabric.strategy.settle(model)
        whole = snapshot(module)

        fabric, model, optimizer, module = set_up(BaguaStrategy(name))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(path, state) == {}
        train(fabric, model, optimizer, range(state["step"], STEPS))
        fabric.strategy.settle(model)
        found.append((whole, snapshot(module)))
    return found


def averages_and_questions() -> tuple[State, list[Any]]:
    fabric, model, optimizer, module = set_up("bagua_async")
    train(fabric, model, optimizer, range(2))
    fabric.strategy.settle(model)
    fabric.strategy.resume(model)
    train(fabric, model, optimizer, range(2, 4))
    fabric.strategy.settle(model)
    rank = torch.tensor(float(fabric.global_rank))
    answers = [fabric.all_reduce(rank, reduce_op="sum"), fabric.all_gather(rank).tolist(), fabric.broadcast(rank)]
    fabric.barrier()
    with pytest.raises(ConfigurationError, match="one optimizer"):
        make_fabric("bagua_low_precision_decentralized").setup_module(nn.Linear(2, 2))
    unused, layer = make_fabric("bagua_find_unused_parameters_true"), nn.Linear(2, 2)
    layer.unused = nn.Parameter(torch.ones(1))
    unused.backward(unused.setup_module(layer)(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigurationError, match=r"fabric\.setup"):
        fabric.strategy.settle(layer)
    return snapshot(module), [*answers, layer.weight.grad.sum().item()]


def finished() -> list[tuple[State, State]]:
    """Before and after the end of training, between two outer steps, and while averages go on in the background."""
    found = []
    for strategy in (BaguaStrategy(DiLoCoAlgorithm(4)), "bagua_async"):
        fabric, model, optimizer, module = set_up(strategy)
        train(fabric, model, optimizer, range(2))
        before = snapshot(module)
        fabric.strategy.finish(model)
        found.append((before, snapshot(module)))
    return found


def everything(folder: str) -> tuple[Any, Any, Any, Any]:
    return through_both(), stop_and_go_on(NAMES, folder), averages_and_questions(), finished()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    # Processes take seconds to import Lightning.
    return ProcessRanks(2).run(everything, str(tmp_path_factory.mktemp("fabric")))


def test_the_weights_are_those_of_ddp(results: list[Any]) -> None:
    for rank, _, _, _ in results:
        for theirs, ours in rank:
            assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_training_goes_on_from_a_checkpoint_bit_by_bit(results: list[Any]) -> None:
    for _, rank, _, _ in results:
        for name, (whole, resumed) in zip(NAMES, rank, strict=True):
            assert all(torch.equal(whole[key], resumed[key]) for key in whole), name
    for position, name in enumerate(NAMES):
        whole = [rank[position][0] for _, rank, _, _ in results]
        if "decentralized" not in name:
            assert_same_on_all_ranks(whole)
        elif name == "decentralized":
            assert not torch.equal(whole[0]["0.weight"], whole[1]["0.weight"])


def test_averages_settle_and_ranks_answer(results: list[Any]) -> None:
    assert_same_on_all_ranks([state for _, _, (state, _), _ in results])
    for _, _, (_, answers), _ in results:
        assert answers == [1.0, [0.0, 1.0], 0.0, 4.0]


def test_training_ends_with_one_model(results: list[Any]) -> None:
    (diloco, averaged), (diloco_there, averaged_there) = (ends for _, _, _, ends in results)
    assert_same_on_all_ranks([averaged[1], averaged_there[1]])
    assert_same_on_all_ranks([diloco[1], diloco_there[1]])
    for name, mean in diloco[1].items():
        own, theirs = diloco[0][name], diloco_there[0][name]
        assert not torch.equal(own, theirs)
        assert torch.allclose(mean, (own + theirs) / 2, atol=1e-6)


def test_names_and_options_that_do_not_exist() -> None:
    with pytest.raises(UnsupportedAlgorithmException, match="bytegrad"):
        Fabric(strategy="bagua_bytegard", accelerator="cpu", devices=2)
    with pytest.raises(TypeError, match="static_graph"):
        BaguaStrategy(static_graph=True)
