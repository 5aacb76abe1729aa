"""Checkpoints of the engine: what exchanges remember, and how training goes on from there."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.checks import check_kind
from bagua.engine.buckets.layout import positions_of
from bagua.engine.formation import Formation
from bagua.engine.state.agreement import compare, compare_or_refuse, gather_objects
from bagua.engine.state.saving import Remembered, digest_of, divided, other_shape, scopes_of, shared_tensors, united
from bagua.errors import ConfigurationError

_log = logging.getLogger("bagua")


def save(formation: Formation, *, copy: bool = True) -> dict[str, Any]:
    """See ``Reducer.state_dict``. Nothing is owed to the optimizers.

    Args:
        formation: formation whose exchanges remember something.
        copy: False for tensors that change with the next exchange.
    """
    formation.settle_loads()
    remembered, flights = formation.scheduler.save(copy=copy)
    shared, own = divided(remembered, scopes_of(formation.declaration))
    return {
        "algorithm": repr(formation.declaration),
        "rank": formation.group.rank,
        "world_size": formation.group.size,
        "step": formation.phases.step,
        # A phase that is over belongs to the past: the next one begins with the step that comes.
        "began": formation.phases.step if formation.phases.is_over else formation.phases.began,
        "buckets": [list(bucket.names) for bucket in formation.scheduler.buckets],
        **shared,
        name_of_rank(formation.group.rank): {**own, "flights": flights},
    }


def digest(formation: Formation) -> str:
    """See ``EngineAccess.bagua_state_digest``. Nothing is owed to the optimizers. Collective."""
    communicator = formation.communicator
    weights = {} if formation.declaration.ranks_differ else formation.model.parameters
    lines = [f"step {formation.phases.step}", *(f"{name}: {digest_of(weight)}" for name, weight in weights.items())]
    lines += [f"{name}: {digest_of(tensor)}" for name, tensor in shared_tensors(formation.scheduler.places)]
    compare(lines, communicator, "states")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def check_saved_state(formation: Formation, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """Refuse what does not belong to this model and algorithm, before anything is changed. Collective.

    Args:
        formation: formation whose exchanges would go on.
        state_dict: as ``save`` returned it.

    Returns:
        The state, and by bucket the positions of its parameters.

    Raises:
        ConfigurationError: it belongs to another algorithm, or to other parameters.
        CollectiveMismatchError: ranks have states of different runs, or another rank refuses.
    """
    refusal: ConfigurationError | None = None
    facts: list[str] = []
    try:
        saved = from_checkpoint(state_dict, formation.declaration, formation.model.parameters)
        members = positions_of(formation.registration, saved["buckets"]) if saved["buckets"] else []
        facts = [f"saved after step {saved['step']}", *(f"bucket {names}" for names in saved["buckets"])]
    except ConfigurationError as error:
        refusal = error
    compare_or_refuse(facts, formation.communicator, "checkpoints", refusal)
    return saved, members


def load(formation: Formation, state_dict: dict[str, Any]) -> None:
    """See ``Reducer.load_state_dict``. Collective.

    Args:
        formation: formation whose exchanges go on.
        state_dict: as ``save`` returned it.
    """
    formation.scheduler.check_loads()
    saved, members = check_saved_state(formation, state_dict)
    own = _own_part(formation, saved)
    formation.scheduler.suspend()  # Results of what was there before must not be folded into weights that are loaded.
    formation.put_aside()
    formation.phases.go_to(saved["step"], saved["began"])
    formation.equality.restart(saved["step"])
    shared = Remembered(parameters=saved["parameters"], others=saved["others"])
    formation.scheduler.load(united(shared, own), own["flights"])
    if members and not formation.idle:
        formation.form(members)
    else:
        formation.form_at_once()


def _own_part(formation: Formation, saved: Mapping[str, Any]) -> Any:
    """What was this rank's own, if every rank was given what it saved itself; else nothing. Collective.

    Raises:
        ConfigurationError: on all ranks, if each was given a file of its own, but some that of another.
    """
    part = saved[name_of_rank(saved["rank"])]
    differs = formation.declaration.ranks_differ and not formation.declaration.in_background
    matters = bool(part["parameters"] or part["others"] or part["flights"])
    mine = {"rank": saved["rank"], "world_size": saved["world_size"], "matters": matters or differs}
    owners = gather_objects(formation.communicator, "the loading of a checkpoint", mine)
    if _is_own(owners):
        return part
    if matters:
        _log.warning(
            "Rank %d goes on from what all ranks had in common in the state of rank %d of %d. "
            "Residuals and other things of its own begin anew.",
            *(formation.group.ranks[formation.group.rank], saved["rank"], saved["world_size"]),
        )
    return {"parameters": {}, "others": [], "flights": []}


def _is_own(owners: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each rank was given what it saved; False for one file for all, and for another number of ranks."""
    size = len(owners)
    own = [owner["rank"] == rank and owner["world_size"] == size for rank, owner in enumerate(owners)]
    of_one = all(owner["rank"] == owners[0]["rank"] for owner in owners)
    resized = any(owner["world_size"] != size for owner in owners)
    matters = any(owner["matters"] for owner in owners)
    if matters and not (all(own) or of_one or resized):
        wrong = own.index(False)
        check_owner(owners[wrong], wrong, size)
    return all(own)


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
