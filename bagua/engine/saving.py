"""What algorithms remember of their buckets: out for a checkpoint, and back into buckets of any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch

from bagua.buckets import Bucket
from bagua.checks import check_kind
from bagua.errors import ConfigurationError

__all__ = ["Remembered", "check_owner", "collect", "from_checkpoint", "is_of_one_rank", "restore"]

Tensors = dict[str, torch.Tensor]


class Remembered(TypedDict):
    """State of all buckets, free of any flat memory.

    Attributes:
        buckets: names of the parameters in each bucket: the layout.
        parameters: by name of the parameter, the state that has an element for each of its elements.
        others: state of each bucket as a whole.
        buffers: by name of the parameter, what was sent and not yet applied.
        exchanged: for each bucket the step whose exchange has not been applied, or -1.
    """

    buckets: list[list[str]]
    parameters: dict[str, Tensors]
    others: list[Tensors]
    buffers: dict[str, Tensors]
    exchanged: list[int]


def _is_elementwise(bucket: Bucket, tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and tensor.numel() == bucket.numel


def collect(buckets: Sequence[Bucket], exchanged: Sequence[int]) -> Remembered:
    """Copies of everything that is remembered of ``buckets``.

    Args:
        buckets: the buckets.
        exchanged: for each bucket the step whose exchange has not been applied, or -1.
    """
    remembered = Remembered(
        buckets=[list(bucket.names) for bucket in buckets],
        parameters={},
        others=[],
        buffers={},
        exchanged=list(exchanged),
    )
    for bucket, step in zip(buckets, exchanged, strict=True):
        elementwise = {key: value for key, value in bucket.state.items() if _is_elementwise(bucket, value)}
        _cut(bucket, elementwise, remembered["parameters"])
        remembered["others"].append(
            {key: value.clone() for key, value in bucket.state.items() if key not in elementwise}
        )
        if step >= 0:
            _cut(bucket, bucket.buffers, remembered["buffers"])
    return remembered


def from_checkpoint(state_dict: Any) -> Remembered:
    """What is remembered in a saved state, which may come from anywhere.

    Raises:
        ConfigurationError: it is no such state, or not a whole one.
    """
    wanted = ("algorithm", "step", "rank", "world_size", *Remembered.__annotations__)
    lacking = [key for key in wanted if key not in state_dict] if isinstance(state_dict, Mapping) else list(wanted)
    if lacking or len({len(state_dict[key]) for key in ("buckets", "others", "exchanged")}) > 1:
        raise ConfigurationError(
            "this is no state of an algorithm",
            argument="state_dict",
            expected="what bagua_state_dict() returned",
            seen=f"no {', '.join(lacking)}" if lacking else "lists of different lengths for each bucket",
        )
    check_kind(str, "the state of an algorithm, by its name", state_dict=state_dict["algorithm"])
    check_kind(int, "the state at the end of a step", state_dict=state_dict["step"])
    remembered: Remembered = {key: state_dict[key] for key in Remembered.__annotations__}  # type: ignore[assignment]
    return remembered


def is_of_one_rank(remembered: Remembered) -> bool:
    """Whether there is more in it than what all ranks have in common: the layout."""
    states = (*remembered["parameters"].values(), *remembered["others"], *remembered["buffers"].values())
    return any(states)


def check_owner(state_dict: Mapping[str, Any], rank: int, size: int) -> None:
    """Check that a saved state is that of this rank, of as many ranks.

    Args:
        state_dict: names its ``rank`` and ``world_size``.
        rank: this rank.
        size: number of ranks.

    Raises:
        ConfigurationError: naming both ranks.
    """
    expected, seen = f"rank {rank} of {size}", f"rank {state_dict['rank']} of {state_dict['world_size']}"
    if seen != expected:
        raise ConfigurationError(
            f"{expected} was given the state of {seen}",
            argument="state_dict",
            expected=expected,
            seen=seen,
            advice="Each rank loads what it saved itself. Another number of ranks goes on from the weights alone.",
        )


def _cut(bucket: Bucket, flats: Tensors, into: dict[str, Tensors]) -> None:
    """Each parameter's part of each flat tensor."""
    parts = {key: bucket.views(flat) for key, flat in flats.items()}
    for position, name in enumerate(bucket.names):
        if parts:
            into[name] = {key: views[position].clone() for key, views in parts.items()}


def restore(buckets: Sequence[Bucket], remembered: Remembered) -> None:
    """Put what was remembered back into ``bucket.state``, which holds initial values.

    Args:
        buckets: in the same layout or another one. Then, what belonged to a bucket as a
            whole goes to the bucket that now holds its first parameter, if it fits.
        remembered: from ``collect``.

    Raises:
        ConfigurationError: the state has other shapes than this algorithm's.
    """
    homes = {names[0]: others for names, others in zip(remembered["buckets"], remembered["others"], strict=True)}
    for bucket in buckets:
        elementwise = {key: value for key, value in bucket.state.items() if _is_elementwise(bucket, value)}
        _paste(bucket, elementwise, remembered["parameters"])
        found = next((homes[name] for name in bucket.names if name in homes), {})
        for key, value in bucket.state.items():
            if key not in elementwise and key in found and found[key].shape == value.shape:
                value.copy_(found[key])
        if any(name in remembered["buffers"] for name in bucket.names):
            keys = {key for name in bucket.names for key in remembered["buffers"].get(name, {})}
            _paste(bucket, {key: bucket.buffer(key) for key in sorted(keys)}, remembered["buffers"])


def _paste(bucket: Bucket, flats: Tensors, source: dict[str, Tensors]) -> None:
    for key, flat in flats.items():
        for name, view in zip(bucket.names, bucket.views(flat), strict=True):
            part = source.get(name, {}).get(key)
            if part is None:
                continue
            if part.shape != view.shape:
                raise ConfigurationError(
                    f"the saved state {key} of {name} has another shape",
                    argument="state_dict",
                    expected=list(view.shape),
                    seen=list(part.shape),
                )
            view.copy_(part)
