"""What the arguments of a reducer mean, and which of their values make sense."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum

from bagua.algorithms import Algorithm, DistributedAlgorithm, GradientAllReduceAlgorithm, as_algorithm
from bagua.comm import ProcessGroup
from bagua.errors import ConfigurationError

__all__ = [
    "BucketType",
    "check_bucket_bytes",
    "check_leader",
    "chosen_algorithm",
    "refuse_unknown",
    "with_hierarchy",
]


class BucketType(Enum):
    """What the buckets of a ``Reducer`` are made of."""

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
    if algorithm is not None:
        return as_algorithm(algorithm)
    if decentralize_reduce or bucket_type is BucketType.Weight:
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


def check_bucket_bytes(bucket_bytes: int) -> int:
    """``bucket_bytes`` if a bucket can be that large."""
    if type(bucket_bytes) is not int or bucket_bytes < 1:
        raise ConfigurationError(
            "buckets cannot have this size",
            argument="bucket_bytes",
            expected="a number of bytes >= 1",
            seen=bucket_bytes,
        )
    return bucket_bytes


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
