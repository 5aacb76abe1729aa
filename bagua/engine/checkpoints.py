"""Checkpoints of the engine: what exchanges remember on this rank, and how training goes on from there."""

from __future__ import annotations

from typing import Any

from bagua.engine.agreement import compare_or_refuse
from bagua.engine.courses import saved_flights
from bagua.engine.formation import BucketFormation
from bagua.engine.layout import positions_of
from bagua.engine.saving import Remembered, check_owner, collect, from_checkpoint, is_of_one_rank
from bagua.errors import ConfigurationError

__all__ = ["load", "save"]


def save(reducer: BucketFormation) -> dict[str, Any]:
    """See ``Reducer.state_dict``. Nothing is owed to the optimizers.

    Args:
        reducer: whose exchanges remember something.
    """
    buckets, flights = [list(bucket.names) for bucket in reducer.buckets], reducer.flights
    remembered = reducer.remembered or collect(())
    if reducer.scheduler is not None:
        flights = saved_flights(reducer.scheduler.settle())
        remembered = collect(reducer.courses.places)
    return {
        "algorithm": repr(reducer.declaration),
        "rank": reducer.group.rank,
        "world_size": reducer.group.size,
        "step": reducer.step,
        "began": reducer.began,
        "buckets": buckets,
        "flights": flights,
        **remembered,
    }


def load(reducer: BucketFormation, state_dict: dict[str, Any]) -> None:
    """See ``Reducer.load_state_dict``. Collective.

    Args:
        reducer: whose exchanges go on.
        state_dict: as ``save`` returned it.
    """
    refusal: ConfigurationError | None = None
    facts: list[str] = []
    try:
        saved = from_checkpoint(state_dict, reducer.declaration)
        # Neighbours have replicas of the weights that a rank of theirs had: the layout is not all that counts.
        if is_of_one_rank(saved) or (reducer.declaration.ranks_differ and reducer.algorithm.plane is None):
            check_owner(saved, reducer.group.rank, reducer.group.size)
        members = positions_of(reducer.registration, saved["buckets"]) if saved["buckets"] else []
        facts = [f"step {saved['step']}", *(f"bucket {names}" for names in saved["buckets"])]
    except ConfigurationError as error:
        refusal = error
    compare_or_refuse(facts, reducer.communicator, "checkpoints", refusal)
    reducer.put_aside()
    reducer.go_to(saved["step"], saved["began"])
    reducer.remembered = Remembered(parameters=saved["parameters"], others=saved["others"])
    reducer.flights = saved["flights"]
    if members and not reducer.idle:
        reducer.form(members)
    else:
        reducer.form_at_once()
