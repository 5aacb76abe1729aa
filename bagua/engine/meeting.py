"""Ranks that change the model, or cannot go on: waiting until all have changed it alike, and telling the others.

They agree through the store, because a communicator may hold gradients of others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from bagua.comm import LongWait, ProcessGroup, gather_values
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    blame,
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
        if isinstance(error, CollectiveTimeoutError | PeerLostError):
            error.problem = f"{error.problem}, after the model was changed on this one: {change}"
        raise


def _meet(group: ProcessGroup, topic: str, change: str) -> None:
    wait, suspects = LongWait(), set[int]()
    until = time.monotonic() + group.timeout_s
    while True:
        left_s = until - time.monotonic()
        try:
            gather_values(group.store, topic, group.rank, group.ranks, change, min(_SLICE_S, max(left_s, 0.0)))
        except CollectiveTimeoutError as error:
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


def _stuck(group: ProcessGroup, stuck: list[int], change: str) -> CollectiveMismatchError:
    rank, others = group.ranks[group.rank], ", ".join(map(str, stuck))
    return CollectiveMismatchError(
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
        problem: what could not be finished; empty as long as all could.
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
            culprit, told = blame(reason, rank, doing)
        for group in (self._group, *others):
            group.abort(told, culprit)
        self.problem = self.problem or problem

    def check(self) -> None:
        """Raise if something could not be finished.

        Raises:
            CommunicatorClosedError: it could not.
        """
        if self.problem:
            raise CommunicatorClosedError(
                f"this model can no longer be synchronized: {self.problem}",
                rank=self._group.ranks[self._group.rank],
                advice="Wrap it anew on all ranks, from a checkpoint: ranks may have made different steps.",
            )
