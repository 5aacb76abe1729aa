"""What a broken connection meant, in the words of ``bagua.errors``."""

from __future__ import annotations

from bagua.comm.c10d_reports import Attendance, Cause
from bagua.comm.transport import Membership
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
)

__all__ = ["closed_error", "lost_error", "timeout_error"]

_RESTART = "Restart the job from its last checkpoint; look at the output of the ranks named here first."


def closed_error(cause: Cause) -> CommunicatorClosedError:
    """This rank ended the communicator itself, earlier or in another thread."""
    return CommunicatorClosedError(f"this rank's side of the communicator {cause.kind}: {cause.reason}")


def timeout_error(attendance: Attendance, elapsed_s: float, timeout_s: float) -> CollectiveTimeoutError:
    """A deadline passed."""
    silent = ", ".join(map(str, attendance.missing))
    who = f"; rank {silent} did not answer" if silent else ""
    return CollectiveTimeoutError(
        f"not complete before its deadline{who}",
        peers=attendance.missing,
        elapsed_s=elapsed_s,
        timeout_s=timeout_s,
        advice="Find out what the silent ranks are doing. Pass timeout= if they may take this long.",
    )


def lost_error(
    attendance: Attendance, membership: Membership, elapsed_s: float, timeout_s: float
) -> CommunicationError:
    """A connection closed, or a call failed on the way."""
    cause = attendance.cause
    if cause is not None and cause.kind == "timed out" and elapsed_s >= timeout_s / 2:
        # This rank waited as well; the other one's clock was only a little ahead.
        return timeout_error(attendance, elapsed_s, timeout_s)
    if cause is not None:
        problem, peers = f"rank {cause.rank} ended the communicator ({cause.kind}): {cause.reason}", (cause.rank,)
    elif not attendance.answered:
        problem, peers = _without_store(membership)
    elif attendance.missing:
        peers = attendance.missing
        names = ", ".join(map(str, peers))
        problem = f"a connection was lost, and rank {names} did not answer: dead, stopped, or gone"
    else:
        problem, peers = "a connection was lost, though all ranks are alive", ()
    return PeerLostError(problem, peers=peers, elapsed_s=elapsed_s, timeout_s=timeout_s, advice=_RESTART)


def _without_store(membership: Membership) -> tuple[str, tuple[int, ...]]:
    problem = "a connection was lost, and the store does not answer either"
    if 0 in membership.ranks and membership.ranks.index(0) != membership.rank:
        host = membership.ranks.index(0)
        return f"{problem}: its host, which is rank {host} unless a launcher keeps it, is probably dead", (host,)
    return f"{problem}: its host is probably dead", ()
