"""A saved state of the engine, which may come from anywhere: whether it is one, and whose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bagua.algorithms import Algorithm
from bagua.checks import check_kind
from bagua.errors import ConfigurationError

__all__ = ["check_owner", "from_checkpoint", "is_of_one_rank"]

_STATE = {"algorithm": str, "step": int, "rank": int, "world_size": int, "began": int}
_LISTS = {"buckets": list, "parameters": dict, "others": list, "flights": list}


def from_checkpoint(state_dict: Any, algorithm: Algorithm) -> dict[str, Any]:
    """A saved state, which may come from anywhere.

    Args:
        state_dict: of the engine.
        algorithm: that it should belong to; its options may be others.

    Raises:
        ConfigurationError: it is no such state, or not a whole one, or one of another algorithm.
    """
    wanted = {**_STATE, **_LISTS}
    lacking = [key for key in wanted if key not in state_dict] if isinstance(state_dict, Mapping) else list(wanted)
    if lacking:
        raise ConfigurationError(
            "this is no state of an algorithm",
            argument="state_dict",
            expected="what bagua_state_dict() returned",
            seen=f"no {', '.join(lacking)}",
        )
    for key, kind in wanted.items():
        check_kind(kind, f"a {kind.__name__} as {key}", state_dict=state_dict[key])
    if state_dict["algorithm"].partition("(")[0] != repr(algorithm).partition("(")[0]:
        raise ConfigurationError(
            "this state belongs to another algorithm",
            argument="state_dict",
            expected=repr(algorithm),
            seen=state_dict["algorithm"],
        )
    return dict(state_dict)


def is_of_one_rank(state_dict: Mapping[str, Any]) -> bool:
    """Whether there is more in it than what all ranks have in common: the layout."""
    return bool(any(state_dict["parameters"].values()) or state_dict["others"] or state_dict["flights"])


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
