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
    return CommunicatorClosedError(f"this rank ended the communicator before ({cause.kind}): {cause.reason}")


def timeout_error(
    attendance: Attendance, membership: Membership, elapsed_s: float, timeout_s: float
) -> CollectiveTimeoutError:
    """A deadline passed."""
    problem, peers = "not complete before its deadline", attendance.missing
    if not attendance.answered:
        about_store, peers = _without_store(membership)
        problem = f"{problem}, {about_store}"
    elif peers:
        problem = f"{problem}; rank {_listed(peers)} did not answer"
    return CollectiveTimeoutError(
        problem,
        peers=peers,
        elapsed_s=elapsed_s,
        timeout_s=timeout_s,
        advice="Find out what the silent ranks are doing. Pass timeout= if they may take this long.",
    )


def lost_error(
    error: BaseException, attendance: Attendance, membership: Membership, elapsed_s: float, timeout_s: float
) -> CommunicationError:
    """A connection closed, or a call failed on the way with ``error``."""
    cause = attendance.cause
    if cause is not None and cause.kind == "timed out" and elapsed_s >= timeout_s / 2:
        # This rank waited as well; the other one's clock was only a little ahead.
        return timeout_error(attendance, membership, elapsed_s, timeout_s)
    peers: tuple[int, ...]
    if cause is not None:
        problem, peers = f"rank {cause.rank} ended the communicator ({cause.kind}): {cause.reason}", (cause.rank,)
    elif not attendance.answered:
        about_store, peers = _without_store(membership)
        problem = f"a connection was lost, {about_store}"
    elif attendance.missing:
        peers = attendance.missing
        problem = f"a connection was lost, and rank {_listed(peers)} did not answer: dead, stopped, or gone"
    else:
        what = str(error).partition("\n")[0]
        problem, peers = f"the call failed, though all ranks are alive: {what}", ()
    return PeerLostError(problem, peers=peers, elapsed_s=elapsed_s, timeout_s=timeout_s, advice=_RESTART)


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


def _without_store(membership: Membership) -> tuple[str, tuple[int, ...]]:
    """What a silent store says, and the rank that hosts it if this is one of the members."""
    if 0 in membership.ranks and membership.ranks.index(0) != membership.rank:
        host = membership.ranks.index(0)
        return f"and the store is silent: rank {host}, its host unless a launcher is, seems dead or stopped", (host,)
    return "and the store is silent: its host seems dead or stopped", ()
