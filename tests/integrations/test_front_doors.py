"""The table of what works with what: each word of it is asked of the code, without training."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
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


def answers(names: Iterable[str], enter: Callable[..., object], *ways: tuple[str, Any]) -> dict[str, str]:
    """Yes; no; or the option with which it is yes, of the algorithm or else of the door."""
    return {name: answer(name, enter, ways) for name in names}


def answer(name: str, enter: Callable[..., object], ways: Iterable[tuple[str, Any]]) -> str:
    known = {field.name for field in dataclasses.fields(registry.get(name))}
    for given in ({}, *({key: value} for key, value in ways)):
        own = {key: value for key, value in given.items() if key in known}
        with contextlib.suppress(ConfigurationError, TypeError):
            enter(Algorithm.init(name, **own), **{key: value for key, value in given.items() if key not in known})
            return "yes" if not given else "".join(f"`{key}={value}`" for key, value in given.items())
    return "no"


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
    assert answers(registry, HookState) == {name: cells[1] for name, cells in table().items()}


def of_shards() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=mesh["shards"])
    group = mesh["replicas"].get_group()

    def enter(algorithm: Algorithm) -> None:
        exchange_shards(model, torch.optim.AdamW(model.parameters()), algorithm, group).bagua_close()

    return answers(registry, enter, ("start_after", 0))


def test_weights_of_shards(process_ranks: Any) -> None:
    said = {name: cells[2] for name, cells in table().items()}
    assert process_ranks(2, of_shards) == [said, said]


def test_islands() -> None:
    def enter(algorithm: Algorithm, **options: Any) -> None:
        layer = nn.Linear(2, 2)
        make = algorithm.optimizer_class or torch.optim.AdamW
        with joined(new_store(), 1) as islands:
            with_bagua(layer, make(layer.parameters()), algorithm, between=islands, **options)

    ways = ("start_after", 0), ("elastic", True)
    assert answers(registry, enter, *ways) == {name: cells[3] for name, cells in table().items()}
