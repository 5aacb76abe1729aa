"""A saved state of the engine, which may come from anywhere: whether it is one, and whose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.checks import check_kind
from bagua.engine.state.saving import other_shape
from bagua.errors import ConfigurationError

#: A dictionary of anything: its keys are names.
_ANY = "any name"
_TENSORS = {_ANY: torch.Tensor}
_PARAMETERS = {_ANY: _TENSORS}
_OTHER = {"label": str, "names": [str], "state": _TENSORS}
_FLIGHT = {
    "label": str,
    "names": [str],
    "step": int,
    "t": int,
    "round": int,
    "loss_scale": float,
    "parameters": _PARAMETERS,
    "proposed": _TENSORS,
}
_STATE = {
    "algorithm": str,
    "step": int,
    "rank": int,
    "world_size": int,
    "began": int,
    "buckets": [[str]],
    "parameters": _PARAMETERS,
    "others": [_OTHER],
}
#: What is under the name of a rank.
_OWN = {"parameters": _PARAMETERS, "others": [_OTHER], "flights": [_FLIGHT]}


def from_checkpoint(
    state_dict: Any, algorithm: Algorithm, parameters: Mapping[str, torch.Tensor] | None = None
) -> dict[str, Any]:
    """A saved state, which may come from anywhere.

    Args:
        state_dict: state of the engine.
        algorithm: algorithm that it should belong to; its options may be others.
        parameters: parameters of the model, by name.

    Raises:
        ConfigurationError: it is no such state, or not a whole one, or one of another algorithm, or of parameters of
            other shapes.
    """
    if not isinstance(state_dict, Mapping):
        raise _incomplete(list(_STATE), "it")
    _check(dict(state_dict), _STATE, "")
    _check(dict(state_dict), {name_of_rank(state_dict["rank"]): _OWN}, "")
    own = state_dict[name_of_rank(state_dict["rank"])]
    if state_dict["algorithm"].partition("(")[0] != repr(algorithm).partition("(")[0]:
        raise ConfigurationError(
            "this state belongs to another algorithm",
            argument="state_dict",
            expected=repr(algorithm),
            seen=state_dict["algorithm"],
        )
    for number, flight in enumerate(own["flights"]):
        lacking = [name for name in flight["names"] if name not in flight["parameters"]]
        if lacking:
            raise _incomplete(lacking, f"flights[{number}].parameters")
    flights = [flight["parameters"] for flight in own["flights"]]
    for source in (state_dict["parameters"], own["parameters"], *flights):
        _check_shapes(source, parameters or {})
    return dict(state_dict)


def _check(value: Any, wanted: Any, place: str) -> None:
    """``wanted`` is a class, or a list or dictionary of what is wanted inside."""
    kind = wanted if isinstance(wanted, type) else type(wanted)
    check_kind(kind, f"a {kind.__name__} as {place or 'state'}", state_dict=value)
    if isinstance(wanted, list):
        for number, one in enumerate(value):
            _check(one, wanted[0], f"{place}[{number}]")
    elif isinstance(wanted, dict) and _ANY in wanted:
        for name, one in value.items():
            _check(one, wanted[_ANY], f"{place}[{name!r}]")
    elif isinstance(wanted, dict):
        lacking = [key for key in wanted if key not in value]
        if lacking:
            raise _incomplete(lacking, place or "it")
        for key, inside in wanted.items():
            _check(value[key], inside, f"{place}.{key}".removeprefix("."))


def _incomplete(lacking: list[str], place: str) -> ConfigurationError:
    return ConfigurationError(
        "this is no state of an algorithm",
        argument="state_dict",
        expected="what bagua_state_dict() returned",
        seen=f"no {', '.join(lacking)} in {place}",
    )


def _check_shapes(saved: Mapping[str, Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> None:
    for name in saved.keys() & parameters.keys():
        for key, part in saved[name].items():
            if part.shape != parameters[name].shape:
                raise other_shape(key, name, expected=parameters[name], seen=part)


def name_of_rank(rank: int) -> str:
    """What is under this key in a saved state is that rank's own; all else is equal on all ranks."""
    return f"rank{rank}"


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
            advice="Let each rank load what it saved itself, or all of them the file of one.",
        )
