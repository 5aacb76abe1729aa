"""Checkpoints of the engine: what exchanges remember, and how training goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.engine.buckets.layout import positions_of
from bagua.engine.formation import Formation
from bagua.engine.state.agreement import compare_or_refuse, gather_objects
from bagua.engine.state.saved_states import check_owner, from_checkpoint, name_of_rank
from bagua.engine.state.saving import Remembered, compare_states, divided, scopes_of, united
from bagua.errors import ConfigurationError

_log = logging.getLogger("bagua")


def save(formation: Formation, *, copy: bool = True) -> dict[str, Any]:
    """See ``Reducer.state_dict``. Nothing is owed to the optimizers.

    Args:
        formation: formation whose exchanges remember something.
        copy: False for tensors that change with the next exchange.
    """
    formation.settle_loads()
    remembered, flights = formation.execution.save(copy=copy)
    shared, own = divided(remembered, scopes_of(formation.declaration))
    return {
        "algorithm": repr(formation.declaration),
        "rank": formation.group.rank,
        "world_size": formation.group.size,
        "step": formation.phases.step,
        # A phase that is over belongs to the past: the next one begins with the step that comes.
        "began": formation.phases.step if formation.phases.is_over else formation.phases.began,
        "buckets": [list(bucket.names) for bucket in formation.execution.buckets],
        **shared,
        name_of_rank(formation.group.rank): {**own, "flights": flights},
    }


def digest(formation: Formation) -> str:
    """See ``EngineAccess.bagua_state_digest``. Nothing is owed to the optimizers. Collective."""
    weights = {} if formation.declaration.ranks_differ else formation.model.parameters
    places = formation.execution.courses.places
    return compare_states(formation.phases.step, weights, places, formation.communicator)


def check(formation: Formation, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
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
    formation.execution.courses.check_loads()
    saved, members = check(formation, state_dict)
    own = _own_part(formation, saved)
    formation.execution.suspend()  # Results of what was there before must not be folded into weights that are loaded.
    formation.put_aside()
    formation.phases.go_to(saved["step"], saved["began"])
    formation.equality.restart(saved["step"])
    shared = Remembered(parameters=saved["parameters"], others=saved["others"])
    formation.execution.load(united(shared, own), own["flights"])
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
