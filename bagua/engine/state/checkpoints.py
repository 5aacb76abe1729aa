"""Checkpoints of the engine: what exchanges remember, and how training goes on from there."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from bagua.engine.buckets.layout import positions_of
from bagua.engine.formation import BucketFormation
from bagua.engine.schedule.courses import saved_flights
from bagua.engine.state.agreement import compare_or_refuse
from bagua.engine.state.saved_states import check_owner, from_checkpoint, name_of_rank
from bagua.engine.state.saving import Remembered, collect, divided, scopes_of, united
from bagua.errors import ConfigurationError

__all__ = ["check", "load", "save"]

_log = logging.getLogger("bagua")


def save(reducer: BucketFormation, *, copy: bool = True) -> dict[str, Any]:
    """See ``Reducer.state_dict``. Nothing is owed to the optimizers.

    Args:
        reducer: reducer whose exchanges remember something.
        copy: False for tensors that change with the next exchange.
    """
    reducer.settle_loads()
    buckets, flights = [list(bucket.names) for bucket in reducer.buckets], reducer.flights
    remembered = reducer.remembered or collect(())
    if reducer.scheduler is not None:
        flights = saved_flights(reducer.scheduler.settle())
        remembered = reducer.courses.remembered(copy=copy)
    shared, own = divided(remembered, scopes_of(reducer.declaration))
    return {
        "algorithm": repr(reducer.declaration),
        "rank": reducer.group.rank,
        "world_size": reducer.group.size,
        "step": reducer.step,
        "began": reducer.began,
        "buckets": buckets,
        **shared,
        name_of_rank(reducer.group.rank): {**own, "flights": flights},
    }


def check(reducer: BucketFormation, state_dict: dict[str, Any]) -> tuple[dict[str, Any], list[list[int]]]:
    """Refuse what does not belong to this model and algorithm, before anything is changed. Collective.

    Args:
        reducer: reducer whose exchanges would go on.
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
        saved = from_checkpoint(state_dict, reducer.declaration, reducer.model.parameters)
        members = positions_of(reducer.registration, saved["buckets"]) if saved["buckets"] else []
        facts = [f"step {saved['step']}", *(f"bucket {names}" for names in saved["buckets"])]
    except ConfigurationError as error:
        refusal = error
    compare_or_refuse(facts, reducer.communicator, "checkpoints", refusal)
    return saved, members


def load(reducer: BucketFormation, state_dict: dict[str, Any]) -> None:
    """See ``Reducer.load_state_dict``. Collective.

    Args:
        reducer: reducer whose exchanges go on.
        state_dict: as ``save`` returned it.
    """
    saved, members = check(reducer, state_dict)
    own = _own_part(reducer, saved)
    if reducer.scheduler is not None:
        reducer.scheduler.settle()
        reducer.scheduler.forget()  # Results of what was there before must not be folded into weights that are loaded.
    reducer.put_aside()
    reducer.go_to(saved["step"], saved["began"])
    reducer.remembered = united(Remembered(parameters=saved["parameters"], others=saved["others"]), own)
    reducer.flights = own["flights"]
    if members and not reducer.idle:
        reducer.form(members)
    else:
        reducer.form_at_once()


def _own_part(reducer: BucketFormation, saved: Mapping[str, Any]) -> Any:
    """What was this rank's own, if every rank was given what it saved itself; else nothing. Collective.

    Raises:
        ConfigurationError: on all ranks, if each was given a file of its own, but some that of another.
    """
    part = saved[name_of_rank(saved["rank"])]
    differs = reducer.declaration.ranks_differ and reducer.algorithm.plane is None
    matters = bool(part["parameters"] or part["others"] or part["flights"])
    mine = {"rank": saved["rank"], "world_size": saved["world_size"], "matters": matters or differs}
    owners = reducer.communicator.allgather_object(mine)
    if _is_own(owners):
        return part
    if matters:
        _log.warning(
            "Rank %d goes on from what all ranks had in common in the state of rank %d of %d. "
            "Residuals and other things of its own begin anew.",
            *(reducer.group.ranks[reducer.group.rank], saved["rank"], saved["world_size"]),
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
