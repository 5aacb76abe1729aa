"""What both ways to train replicas of a model that FSDP2 shards must know of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from bagua.comm import ProcessGroup
from bagua.engine import take_state
from bagua.errors import ConfigurationError


def sharded_parts(module: torch.nn.Module) -> dict[str, Any]:
    """Those of ``module`` to which ``fully_shard`` was applied, by name.

    Raises:
        ConfigurationError: there are none.
    """
    # What ``fully_shard`` was applied to is known by what it can do then.
    parts: dict[str, Any] = {
        name: part for name, part in module.named_modules() if hasattr(part, "set_all_reduce_hook")
    }
    if not parts:
        raise ConfigurationError(
            "nothing in this module is sharded",
            argument="module",
            expected="a module that fully_shard was applied to",
            seen=type(module).__name__,
        )
    return parts


def refuse_shared_mesh(parts: Iterable[torch.nn.Module], group: ProcessGroup, argument: str) -> None:
    """Refuse ranks that hold other shards, or whose gradients torch sums by itself.

    Args:
        parts: modules to which ``fully_shard`` was applied.
        group: ranks that are to exchange with each other.
        argument: name of the argument that gives the group.

    Raises:
        ConfigurationError: some of them are in the mesh of a part.
    """
    others = set(group.ranks) - {group.ranks[group.rank]}
    if shared := others.intersection(ranks_of_meshes(parts)):
        raise ConfigurationError(
            "torch sums gradients over these ranks already",
            argument=argument,
            expected="a process_group of ranks that hold the same shard, each in a mesh of its own",
            seen=f"ranks {sorted(shared)}, which are in the mesh of the module",
            advice="Give fully_shard the shards' dimension of a mesh, and use the group of the other one.",
        )


def ranks_of_meshes(parts: Iterable[torch.nn.Module]) -> set[int]:
    """The ranks among which the parameters of ``parts`` are sharded."""
    parameters = itertools.chain.from_iterable(part.parameters() for part in parts)
    meshes: set[Any] = {one.device_mesh for one in parameters if hasattr(one, "device_mesh")}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of what this rank holds of ``parameter``: its shard, or all of it."""
    whole: Any = parameter.detach()
    local: torch.Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return local


class LocalState:
    """What an optimizer of sharded parameters remembers of the shards of this rank, without the mesh."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """As that of the optimizer; shards stand in dictionaries of their own."""
        saved = self._optimizer.state_dict()
        state = {
            number: {key: {_SHARD: local_of(one)} if hasattr(one, "to_local") else one for key, one in known.items()}
            for number, known in saved["state"].items()
        }
        return {**saved, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the optimizer remember what ``state_dict`` returned on a rank with the same shards of a mesh alike."""
        parameters = [one for group in self._optimizer.param_groups for one in group["params"]]
        state = {
            number: {
                key: _shard_like(parameters[number], one[_SHARD]) if isinstance(one, dict) else one
                for key, one in known.items()
            }
            for number, known in state_dict["state"].items()
        }
        take_state(self._optimizer, {**state_dict, "state": state})


_SHARD = "shard"


def _shard_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded as ``parameter`` is, of which this rank holds ``local``."""
    whole = torch.zeros_like(parameter.detach(), dtype=local.dtype)
    local_of(whole).copy_(local)
    return whole
