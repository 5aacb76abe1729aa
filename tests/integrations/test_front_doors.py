"""The table of what works with what: each word of it is asked of the code, without training."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bagua.algorithms import Algorithm, registry
from bagua.comm import solo_group
from bagua.errors import ConfigurationError
from bagua.integrations.ddp_comm_hooks import HookState
from bagua.integrations.fsdp import exchange_shards
from bagua.parallel import with_bagua
from bagua.torch_api.distributed import ModelSwitchWrapper, bagua_init
from tests.harness import on_ranks
from tests.membership.training import joined, new_store

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def table() -> dict[str, list[str]]:
    """What the page says: for each algorithm, the cells of its row; no algorithm has two."""
    text = PAGE.read_text(encoding="utf-8").partition("<!-- front doors -->")[2].partition("<!-- end")[0]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    named = [(name.strip("`"), cells) for names, *cells in rows for name in names.split(", ")]
    assert len(named) == len(dict(named))
    return dict(named)


def answers(enter: Callable[..., object], **ways: Any) -> dict[str, str]:
    """Yes; no; or the option with which it is yes, of the algorithm or else of the door."""
    found = dict.fromkeys(registry, "no")
    for name in registry:
        known = {field.name for field in dataclasses.fields(registry.get(name))}
        for given in ({}, *({key: value} for key, value in ways.items())):
            own = {key: value for key, value in given.items() if key in known}
            with contextlib.suppress(ConfigurationError, TypeError):
                enter(Algorithm.init(name, **own), **{key: value for key, value in given.items() if key not in known})
                found[name] = "".join(f"`{key}={value}`" for key, value in given.items()) or "yes"
                break
    return found


def with_a_switch(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, process_group: Any) -> object:
    return ModelSwitchWrapper(model, optimizer, process_group=process_group).switch_to(name)


@pytest.mark.parametrize("enter", [with_bagua, bagua_init, with_a_switch])
def test_wrappers_take_all_and_name_the_optimizer(enter: Callable[..., Any]) -> None:
    for name, (said, *_) in table().items():
        wanted, layer = registry.get(name).optimizer_class, nn.Linear(2, 2)
        assert (wanted is None) == (said == "yes"), name
        refused: Any = contextlib.nullcontext()
        if wanted is not None:
            refused = pytest.raises(ConfigurationError, match=said.split("`")[1])
            assert said.startswith(f"`{wanted.__name__}`"), name
        with refused:
            enter(layer, torch.optim.AdamW(layer.parameters()), name, process_group=solo_group())


def test_hooks() -> None:
    assert answers(HookState) == {name: cells[1] for name, cells in table().items()}


@on_ranks(2, pool="process_pool")
def test_weights_of_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=mesh["shards"])
    group = mesh["replicas"].get_group()

    def enter(algorithm: Algorithm) -> None:
        exchange_shards(model, torch.optim.AdamW(model.parameters()), algorithm, group).bagua_close()

    assert answers(enter, start_after=0) == {name: cells[2] for name, cells in table().items()}


def test_islands() -> None:
    def enter(algorithm: Algorithm, **options: Any) -> None:
        layer = nn.Linear(2, 2)
        make = algorithm.optimizer_class or torch.optim.AdamW
        with joined(new_store(), 1) as islands:
            with_bagua(layer, make(layer.parameters()), algorithm, between=islands, **options)

    assert answers(enter, start_after=0, elastic=True) == {name: cells[3] for name, cells in table().items()}
