"""What both ways to train replicas of a model that FSDP2 shards must know of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bagua.errors import ConfigurationError

__all__ = ["local_of", "ranks_of_mesh", "refuse_shared_mesh", "sharded_parts"]


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


def refuse_shared_mesh(part: torch.nn.Module, others: Iterable[int], argument: str) -> None:
    """Refuse ranks that hold other shards, or whose gradients torch sums by itself.

    Args:
        part: module to which ``fully_shard`` was applied.
        others: ranks that this one is to exchange with.
        argument: name of the argument that gives them.

    Raises:
        ConfigurationError: some of them are in the mesh of ``part``.
    """
    shared = ranks_of_mesh(part).intersection(others)
    if shared:
        raise ConfigurationError(
            "torch sums gradients over these ranks already",
            argument=argument,
            expected="a process_group of ranks that hold the same shard, each in a mesh of its own",
            seen=f"ranks {sorted(shared)}, which are in the mesh of the module",
            advice="Give fully_shard the shards' dimension of a mesh, and use the group of the other one.",
        )


def ranks_of_mesh(part: torch.nn.Module) -> set[int]:
    """The ranks among which the parameters of ``part`` are sharded."""
    meshes: set[Any] = {one.device_mesh for one in part.parameters() if hasattr(one, "device_mesh")}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The memory of what this rank holds of ``parameter``: its shard, or all of it."""
    whole: Any = parameter.detach()
    local: torch.Tensor = whole.to_local() if hasattr(whole, "to_local") else whole
    return local
