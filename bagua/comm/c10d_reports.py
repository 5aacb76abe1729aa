"""What ranks tell each other through the store when their connections are gone.

The rank that breaks a communicator on purpose, or gives up waiting, leaves the cause
there first. Whoever then finds its connections closed reports that it is alive. Who
has not reported soon after is lost. The store itself may be gone or may never
answer (its host died or was stopped), so everything here is bounded in time.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from torch.distributed import Store

from bagua.comm.background import bounded, stand_by

__all__ = ["ATTENDANCE_S", "Attendance", "Cause", "Reports", "meet"]

#: How long a survivor has to report before it counts as lost.
ATTENDANCE_S = 0.6
#: How long one conversation with the store may take on top of that.
_STORE_S = 0.3
_POLL_S = 0.01
_MEETING_POLL_S = 0.05
_CAUSE = "cause"


class Cause(NamedTuple):
    """Why a communicator broke, as the rank that broke it says.

    Attributes:
        rank: that rank.
        kind: ``aborted``, ``timed out`` or ``closed``.
        reason: for people.
    """

    rank: int
    kind: str
    reason: str


class Attendance(NamedTuple):
    """What the store knows some time after a communicator broke.

    Attributes:
        answered: whether the store could be asked at all.
        cause: who broke the communicator and why; None if nobody says so.
        missing: ranks that did not report.
    """

    answered: bool
    cause: Cause | None = None
    missing: tuple[int, ...] = ()


class Reports:
    """The notes about one communicator.

    Args:
        store: shared by its ranks, and by nobody else.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._keys = {other: f"report/{other}" for other in range(size)}
        self._answers = True
        stand_by()

    def leave(self, cause: Cause) -> None:
        """Leave ``cause`` for the others, unless another rank was first, and report."""
        self._answers = bounded(lambda: self._leave(cause), _STORE_S) is not None

    def _leave(self, cause: Cause) -> bool:
        self._store.set(self._keys[self._rank], "here")
        self._store.compare_set(_CAUSE, "", json.dumps(cause))
        return True

    def attend(self) -> Attendance:
        """Report, wait until everyone has, but not for long, and say who is missing and why."""
        # A store that did not take the cause will not tell more.
        found = bounded(self._attend, ATTENDANCE_S + _STORE_S) if self._answers else None
        return Attendance(answered=False) if found is None else found

    def _attend(self) -> Attendance:
        self._store.set(self._keys[self._rank], "here")
        deadline = time.monotonic() + ATTENDANCE_S
        missing = _await_keys(self._store, self._keys, deadline, _POLL_S)
        return Attendance(True, self.cause(), missing)

    def cause(self) -> Cause | None:
        """The cause that some rank left, if any. Not bounded in time."""
        if not self._store.check([_CAUSE]):
            return None
        rank, kind, reason = json.loads(self._store.get(_CAUSE))
        return Cause(int(rank), str(kind), str(reason))


def meet(store: Store, rank: int, size: int, timeout_s: float) -> tuple[int, ...]:
    """Wait until all ranks are here; the ranks that did not come in time.

    Unlike the connection set-up of backends, this can be interrupted with Ctrl-C.
    """
    keys = {other: f"here/{other}" for other in range(size)}
    store.set(keys[rank], "")
    return _await_keys(store, keys, time.monotonic() + timeout_s, _MEETING_POLL_S)


def _await_keys(store: Store, keys: dict[int, str], deadline: float, poll_s: float) -> tuple[int, ...]:
    """Wait until the keys of all ranks are in the store; those whose keys are not in time."""
    # Not store.wait in slices: its client writes a warning to stderr whenever a slice ends.
    everyone = list(keys.values())
    pause_s = 0.001
    while not store.check(everyone):
        if time.monotonic() >= deadline:
            return tuple(rank for rank, key in keys.items() if not store.check([key]))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, poll_s)
    return ()
