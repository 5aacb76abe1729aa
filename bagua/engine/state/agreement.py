"""Finding out, before anything else is exchanged, whether all ranks wrapped the same thing.

Then ranks that change the model, or cannot go on: waiting until all have changed it alike, and telling the others. They
agree through the store, because a communicator may hold gradients of others.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from bagua import errors
from bagua.comm import Communicator, LongWait, ProcessGroup, gather_values

#: By the beginning of a fact, what it is about, and what to do if it differs.
_SUBJECTS = {
    "algorithm ": ("algorithms", "Name the same algorithm with the same options on every rank."),
    "optimizer ": ("optimizers", "Build the same optimizers over the same parameters on every rank."),
    "saved after step ": (
        "steps in their checkpoints",
        "Load the newest step that all ranks have. Keep the step before until all ranks have written theirs.",
    ),
    "loaded state": ("states of this hook", "Call load_state_dict on every rank before the same step, or on none."),
}


def gather_objects(communicator: Communicator, purpose: str, value: Any) -> list[Any]:
    """What each rank brings to an agreement of all. Collective.

    Args:
        communicator: communicator of the ranks.
        purpose: subject of the agreement, for the error if ranks mean different agreements.
        value: contribution of this rank.

    Raises:
        CollectiveMismatchError: on all ranks, if their purposes differ.
    """
    if communicator.size == 1:
        return [value]
    everyone = communicator.allgather_object([purpose, value])
    # A call that is no agreement may have met this one.
    everyone = [one if isinstance(one, list) and len(one) == 2 else ["another call", one] for one in everyone]
    ranks, own = communicator.ranks, communicator.rank
    others = [rank for rank, (theirs, _) in enumerate(everyone) if theirs != purpose]
    if others:
        raise errors.CollectiveMismatchError(
            "ranks make different calls on the model",
            rank=ranks[own],
            peers=[ranks[rank] for rank in others],
            expected=purpose,
            seen=everyone[others[0]][0],
            advice="Call bagua_load_state_dict, bagua_finish and the like on every rank, at the same place.",
        )
    return [theirs for _, theirs in everyone]


def compare(facts: Sequence[str], communicator: Communicator, what: str) -> None:
    """Check that ``facts`` are equal on all ranks. Collective.

    Args:
        facts: one line for each fact, in an order that equal ranks have in common.
        communicator: communicator of the ranks to compare.
        what: subject of the facts, for the message.

    Raises:
        CollectiveMismatchError: on all ranks, naming the first difference.

    Example:
        >>> from bagua.comm import solo_group
        >>> compare(["weight: 2 x 2"], solo_group().global_communicator, "models")
    """
    if communicator.size == 1:
        return
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    purpose = f"a comparison of {what}"
    if len(set(gather_objects(communicator, purpose, digest))) == 1:
        return
    everyone = gather_objects(communicator, purpose, list(facts))
    own = everyone[communicator.rank]
    other = next(
        rank for rank, theirs in enumerate(everyone) if theirs != own and (rank == 0 or own == everyone[0] != theirs)
    )
    here, there = _first_difference(own, everyone[other])
    differing, advice = _subject(here, there, what)
    raise errors.CollectiveMismatchError(
        f"ranks have different {differing}; the first difference from rank {communicator.ranks[other]}",
        rank=communicator.ranks[communicator.rank],
        peers=(communicator.ranks[other],),
        expected=here,
        seen=there,
        advice=advice,
    )


def compare_or_refuse(
    facts: Sequence[str], communicator: Communicator, what: str, refusal: errors.BaguaError | None
) -> None:
    """``compare``, where this rank may have found out that it cannot go on. Collective.

    Raising at once would leave ranks that have no reason to refuse waiting for this one.

    Args:
        facts: as for ``compare``; not looked at if there is a refusal.
        communicator: communicator of the ranks to compare.
        what: subject of the facts, for the message.
        refusal: why this rank cannot go on.

    Raises:
        BaguaError: the refusal, on this rank.
        CollectiveMismatchError: there is a difference, or another rank refuses.
    """
    shown = facts if refusal is None else [f"{what} that cannot be used: {refusal.args[0]}"]
    try:
        compare(shown, communicator, what)
    except errors.CollectiveMismatchError as mismatch:
        if refusal is None:
            raise
        raise refusal from mismatch
    if refusal is not None:
        raise refusal


def _subject(here: str, there: str, what: str) -> tuple[str, str]:
    """What differs if these two facts do, and what to do about it."""
    for start, (differing, advice) in _SUBJECTS.items():
        if here.startswith(start) and there.startswith(start):
            return differing, advice
    option, equals, _ = here.partition("=")
    if equals and there.startswith(f"{option}="):
        return f"options ({option})", f"Pass the same {option} on every rank."
    return what, "Build the same model with the same options on every rank."


def _first_difference(own: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    for here, there in zip(own, other, strict=False):
        if here != there:
            return here, there
    shared = min(len(own), len(other))
    return (own[shared] if len(own) > shared else "nothing more"), (
        other[shared] if len(other) > shared else "nothing more"
    )


_SLICE_S = 0.2
_ADVICE = "Change the model on every rank before the same step: load_state_dict and requires_grad_ on all of them."


def meet(group: ProcessGroup, topic: str, change: str) -> None:
    """Return when all ranks have come with a change. Collective.

    Args:
        group: private to the model. It is broken if not all come.
        topic: used once for each change.
        change: description of what this rank has changed.

    Raises:
        CollectiveMismatchError: another rank makes a step without the change, and waits for this one in it.
        CollectiveTimeoutError: not all ranks came.
    """
    try:
        _meet(group, topic, change)
    except BaseException as error:
        told = f"it waited for a change of the model that other ranks did not make: {change}"
        group.abort(told, group.ranks[group.rank])
        if isinstance(error, errors.CollectiveTimeoutError | errors.PeerLostError):
            error.problem = f"{error.problem}, after the model was changed on this one: {change}"
        raise


def _meet(group: ProcessGroup, topic: str, change: str) -> None:
    wait, suspects = LongWait(), set[int]()
    until = time.monotonic() + group.timeout_s
    while True:
        left_s = until - time.monotonic()
        try:
            gather_values(group.store, topic, group.rank, group.ranks, change, min(_SLICE_S, max(left_s, 0.0)))
        except errors.CollectiveTimeoutError as error:
            if left_s <= _SLICE_S:
                error.elapsed_s, error.timeout_s = round(wait.waited_s(), 3), group.timeout_s
                error.advice = _ADVICE
                raise
            missing = set(error.peers)
        else:
            return
        waiting = missing.intersection(group.global_communicator.awaited_by())
        if stuck := sorted(waiting & suspects):  # Seen twice: it is not about to come.
            raise _stuck(group, stuck, change)
        suspects = waiting
        if wait.is_over():
            wait.warn(group.ranks[group.rank], sorted(missing), f"to change the model, too: {change}. {_ADVICE}")


def _stuck(group: ProcessGroup, stuck: list[int], change: str) -> errors.CollectiveMismatchError:
    rank, others = group.ranks[group.rank], ", ".join(map(str, stuck))
    return errors.CollectiveMismatchError(
        f"the model was changed on rank {rank} ({change}), and not on rank {others}, which makes a step without that",
        rank=rank,
        peers=stuck,
        advice=_ADVICE,
    )


class StepFailure:
    """What a rank could not finish, and has told the others that wait for it.

    Args:
        group: private to the model.

    Attributes:
        problem: name of what could not be finished; empty as long as all could.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.problem = ""

    def tell(self, reason: BaseException | str, doing: str, others: Iterable[ProcessGroup] = ()) -> None:
        """End what cannot be finished here; ranks that wait for the rest of it get ``PeerLostError``.

        Args:
            reason: error that was raised here, or words.
            doing: words for what this rank was doing.
            others: connections of the model beside its group.
        """
        rank = self._group.ranks[self._group.rank]
        if isinstance(reason, str):
            problem, culprit, told = reason, rank, f"it gave up: {reason}"
        else:
            problem = str(getattr(reason, "problem", None) or repr(reason))
            culprit, told = errors.blame(reason, rank, doing)
        for group in (self._group, *others):
            group.abort(told, culprit)
        self.problem = self.problem or problem

    def check(self) -> None:
        """Raise if something could not be finished.

        Raises:
            CommunicatorClosedError: it could not.
        """
        if self.problem:
            raise errors.CommunicatorClosedError(
                f"this model can no longer be synchronized: {self.problem}",
                rank=self._group.ranks[self._group.rank],
                advice="Wrap it anew on all ranks, from a checkpoint: ranks may have made different steps.",
            )
