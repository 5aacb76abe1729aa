"""What the arguments of a reducer mean, and which of their values make sense."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any

import torch

from bagua.algorithms import Algorithm, DistributedAlgorithm, GradientAllReduceAlgorithm, as_algorithm
from bagua.checks import check_flags, check_kind, check_whole, wrong_type
from bagua.comm import ProcessGroup
from bagua.errors import ConfigurationError

__all__ = [
    "BucketType",
    "TensorDeclaration",
    "check_bucket_bytes",
    "check_grad_scaler",
    "check_leader",
    "check_module",
    "check_optional_flag",
    "check_what_engines_get",
    "chosen_algorithm",
    "optimizer_list",
    "refuse_unknown",
    "with_hierarchy",
]


#: What ``buckets`` lists: a parameter, or its name.
TensorDeclaration = torch.Tensor | str


class BucketType(Enum):
    """What the buckets of a ``Reducer`` are made of. Parameters of the module are its weights."""

    Gradient = 0
    Weight = 1
    Param = 2


def chosen_algorithm(
    algorithm: Algorithm | DistributedAlgorithm | str | None,
    bucket_type: BucketType,
    hierarchical_reduce: bool,
    decentralize_reduce: bool,
    chunking: bool,
) -> Algorithm:
    """The algorithm, by name or by the flags of the documented constructor."""
    check_kind(BucketType, "a BucketType", bucket_type=bucket_type)
    check_flags(hierarchical_reduce=hierarchical_reduce, decentralize_reduce=decentralize_reduce, chunking=chunking)
    if algorithm is not None:
        return as_algorithm(algorithm)
    if decentralize_reduce or bucket_type is not BucketType.Gradient:
        return Algorithm.init(DistributedAlgorithm.Decentralize, hierarchical=hierarchical_reduce)
    if chunking:
        return Algorithm.init(DistributedAlgorithm.ScatterGatherAllReduce, hierarchical=hierarchical_reduce)
    return GradientAllReduceAlgorithm(hierarchical=hierarchical_reduce)


def with_hierarchy(declaration: Algorithm, hierarchical: bool) -> Algorithm:
    """The same algorithm, hierarchical or flat."""
    if "hierarchical" not in {field.name for field in dataclasses.fields(declaration)}:  # type: ignore[arg-type]
        raise ConfigurationError(
            f"{declaration!r} has no hierarchical form",
            argument="hierarchical_reduce",
            expected=None,
            seen=hierarchical,
        )
    return dataclasses.replace(declaration, hierarchical=hierarchical)  # type: ignore[type-var]


def refuse_unknown(unknown: Mapping[str, object], known: Iterable[str]) -> None:
    """Raise a ``TypeError`` that names what is known, if there is anything unknown."""
    if unknown:
        raise TypeError(f"unknown keyword arguments: {', '.join(unknown)}; known ones are {', '.join(known)}")


def check_bucket_bytes(bucket_bytes: int, argument: str = "bucket_bytes") -> int:
    """``bucket_bytes`` if a bucket can be that large."""
    check_whole(1, **{argument: bucket_bytes})
    return bucket_bytes


def check_module(module: object, argument: str = "module") -> None:
    """Raise ``InvalidTypeError`` unless this is a module."""
    check_kind(torch.nn.Module, "a torch.nn.Module", **{argument: module})


def check_grad_scaler(grad_scaler: object) -> None:
    """Raise ``InvalidTypeError`` unless this is a ``GradScaler``, or None."""
    check_kind((torch.amp.GradScaler, NoneType), "a torch.amp.GradScaler, or None", grad_scaler=grad_scaler)


def check_what_engines_get(module: object, grad_scaler: object, **flags: object) -> None:
    """Raise ``InvalidTypeError`` for the first of these arguments that is of another kind."""
    check_flags(**flags)
    check_module(module)
    check_grad_scaler(grad_scaler)


def check_optional_flag(**flags: object) -> None:
    """Raise ``InvalidTypeError`` for the first of ``flags`` that is neither True, nor False, nor None."""
    check_kind((bool, NoneType), "True, False or None", **flags)


def optimizer_list(
    optimizers: Sequence[torch.optim.Optimizer] | torch.optim.Optimizer | None, argument: str = "optimizers"
) -> list[torch.optim.Optimizer]:
    """One optimizer, several, or none, as a list.

    Raises:
        InvalidTypeError: something else than optimizers.
    """
    if optimizers is None:
        return []
    given: Any = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else optimizers
    several = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise wrong_type(argument, "an optimizer, or a list of optimizers", optimizer)
    return several


def check_leader(intra_comm_root_rank: int, group: ProcessGroup) -> int:
    """``intra_comm_root_rank`` if every host of ``group`` has such a local rank."""
    smallest = min(group.node_sizes)
    if type(intra_comm_root_rank) is not int or not 0 <= intra_comm_root_rank < smallest:
        raise ConfigurationError(
            "not a local rank that every host has",
            argument="intra_comm_root_rank",
            expected=f"a whole number from 0 to {smallest - 1}",
            seen=intra_comm_root_rank,
        )
    return intra_comm_root_rank
