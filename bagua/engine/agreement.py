"""Finding out, before anything else is exchanged, whether all ranks wrapped the same thing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from bagua.comm import Communicator
from bagua.errors import BaguaError, CollectiveMismatchError

__all__ = ["compare", "compare_or_refuse"]


def compare(facts: Sequence[str], communicator: Communicator, what: str) -> None:
    """Check that ``facts`` are equal on all ranks. Collective.

    Args:
        facts: one line for each fact, in an order that equal ranks have in common.
        communicator: of the ranks to compare.
        what: what the facts describe, for the message.

    Raises:
        CollectiveMismatchError: on all ranks, naming the first difference.

    Example:
        >>> from bagua.comm import solo_group
        >>> compare(["weight: 2 x 2"], solo_group().global_communicator, "models")
    """
    if communicator.size == 1:
        return
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    if len(set(communicator.allgather_object(digest))) == 1:
        return
    everyone = communicator.allgather_object(list(facts))
    own = everyone[communicator.rank]
    other = next(
        rank for rank, theirs in enumerate(everyone) if theirs != own and (rank == 0 or own == everyone[0] != theirs)
    )
    here, there = _first_difference(own, everyone[other])
    raise CollectiveMismatchError(
        f"ranks have different {what}; the first difference from rank {communicator.ranks[other]}",
        rank=communicator.ranks[communicator.rank],
        peers=(communicator.ranks[other],),
        expected=here,
        seen=there,
        advice="Build the same model with the same options on every rank.",
    )


def compare_or_refuse(facts: Sequence[str], communicator: Communicator, what: str, refusal: BaguaError | None) -> None:
    """``compare``, where this rank may have found out that it cannot go on. Collective.

    Raising at once would leave ranks that have no reason to refuse waiting for this one.

    Args:
        facts: as for ``compare``; not looked at if there is a refusal.
        communicator: of the ranks to compare.
        what: what the facts describe, for the message.
        refusal: why this rank cannot go on.

    Raises:
        BaguaError: the refusal, on this rank.
        CollectiveMismatchError: there is a difference, or another rank refuses.
    """
    shown = facts if refusal is None else [f"{what} that cannot be used: {refusal.args[0]}"]
    try:
        compare(shown, communicator, what)
    except CollectiveMismatchError as mismatch:
        if refusal is None:
            raise
        raise refusal from mismatch
    if refusal is not None:
        raise refusal


def _first_difference(own: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    for here, there in zip(own, other, strict=False):
        if here != there:
            return here, there
    shared = min(len(own), len(other))
    return (own[shared] if len(own) > shared else "nothing more"), (
        other[shared] if len(other) > shared else "nothing more"
    )
