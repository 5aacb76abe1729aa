"""What the arguments of a reducer mean, and which of their values make sense."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple, TypedDict

import torch

from bagua.algorithms import Algorithm, DistributedAlgorithm, as_algorithm
from bagua.buckets import check_align_bytes
from bagua.checks import check_flags, check_kind, check_whole, did_you_mean
from bagua.comm import Group, ProcessGroup
from bagua.engine.buckets.layout import bucket_lists
from bagua.errors import ConfigurationError

#: What ``buckets`` lists: a parameter, or its name.
TensorDeclaration = torch.Tensor | str


class BucketType(Enum):
    """What the buckets of a ``Reducer`` are made of. Parameters of the module are its weights."""

    Gradient = 0
    Weight = 1
    Param = 2


DEFAULT_BUCKET_BYTES = 10_000_000
_AGREED = ("bucket_bytes", "align_bytes", "chunking", "fusion", "find_unused_parameters", "delay_reduce", "check_every")


class Setting(NamedTuple):
    """What can be tuned while a model trains.

    Args:
        bucket_bytes: a bucket is closed when it holds so many bytes.
        hierarchical: inside each host first, then between hosts.
    """

    bucket_bytes: int
    hierarchical: bool = False


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """How the engine works, whatever it exchanges. Checked when it is made.

    Args:
        bucket_bytes: a bucket is closed when it holds so many bytes.
        align_bytes: buckets are padded to a multiple of this power of two.
        chunking: pad buckets so that they split evenly over the ranks.
        fusion: gradients and weights of a bucket live in flat memory.
        buckets: lists of parameters, or of their names, to use instead of forming buckets.
        find_unused_parameters: a parameter without a gradient counts as zero; otherwise it is an error.
        delay_reduce: start no exchange before the end of backward.
        grad_scaler: the ``GradScaler`` of the training loop.
        intra_comm_root_rank: the local rank that speaks for its host, on every host.
        check_every: steps from one comparison of what must be equal on all ranks to the next, after those in the first
            step and, where ranks hold equal weights, in the second one; 0 for the first step alone; None for 100 where
            ranks hold equal weights, and what suits the algorithm elsewhere.

    Raises:
        ConfigurationError: a value that cannot be used.
    """

    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    align_bytes: int = 8
    chunking: bool = False
    fusion: bool = True
    buckets: Sequence[Sequence[torch.Tensor | str]] = ()
    find_unused_parameters: bool = False
    delay_reduce: bool = False
    grad_scaler: torch.amp.GradScaler | None = None
    intra_comm_root_rank: int = 0
    check_every: int | None = None

    def __post_init__(self) -> None:
        check_bucket_bytes(self.bucket_bytes)
        check_align_bytes(self.align_bytes)
        check_flags(
            fusion=self.fusion,
            find_unused_parameters=self.find_unused_parameters,
            delay_reduce=self.delay_reduce,
            chunking=self.chunking,
        )
        check_grad_scaler(self.grad_scaler)
        if self.check_every is not None:
            check_whole(0, check_every=self.check_every)
        object.__setattr__(self, "buckets", bucket_lists(self.buckets))

    @property
    def facts(self) -> list[str]:
        """One line for each option that all ranks must have in common, but for the buckets."""
        return [f"{name}={getattr(self, name)}" for name in _AGREED]


def refuse_unknown(
    unknown: Mapping[str, object], known: Iterable[str], algorithm: Algorithm | DistributedAlgorithm | str | None = None
) -> None:
    """Raise a ``TypeError`` that names what is known, or says that it is an option of ``algorithm``."""
    if unknown:
        known = list(known)
        meant = [did_you_mean(name, known) for name in unknown]
        kind = None if algorithm is None else type(as_algorithm(algorithm))
        options = [name for name in unknown if name in getattr(kind, "__dataclass_fields__", ())]
        if kind is not None and options:
            values = ", ".join(f"{name}=..." for name in options)
            meant = [f"The algorithm has {', '.join(options)}: pass {kind.__name__}({values}) as the algorithm."]
        text = f"unknown keyword arguments: {', '.join(unknown)}; known ones are {', '.join(known)}"
        raise TypeError(". ".join(filter(None, (text, " ".join(filter(None, meant))))))


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
        check_kind(torch.optim.Optimizer, "an optimizer, or a list of optimizers", **{argument: optimizer})
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


class EngineKeywords(TypedDict, total=False):
    """What each entry point takes."""

    bucket_bytes: int
    buckets: Sequence[Sequence[torch.Tensor | str]]
    check_every: int | None
    find_unused_parameters: bool
    grad_scaler: torch.amp.GradScaler | None
    process_group: Group | None


class ReducerOptions(EngineKeywords, total=False):
    """Keyword options of ``Reducer``."""

    algorithm: Algorithm | DistributedAlgorithm | str | None
    intra_comm_root_rank: int


class SwitchOptions(EngineKeywords, total=False):
    """Keyword options of ``ModelSwitchWrapper`` beside the documented ones."""

    align_bytes: int
    chunking: bool
    fusion: bool
