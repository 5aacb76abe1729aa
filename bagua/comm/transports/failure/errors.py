"""What a broken connection meant, in the words of ``bagua.errors``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.comm.transports.failure.notices import Cause, Findings
from bagua.errors import CollectiveTimeoutError, CommunicationError, CommunicatorClosedError, PeerLostError

#: What is known of a rank that refuses connections.
ENDED = "it ended, or closed its communicator"


def ended_error(cause: Cause, rank: int) -> CommunicationError:
    """Of a call on a communicator that rank ``rank`` itself ended, earlier or in another thread."""
    if cause.culprit != rank:
        return PeerLostError.of(cause.culprit, cause.reason)
    return CommunicatorClosedError(f"this rank ended the communicator before ({cause.kind}): {cause.reason}")


def timeout_error(missing: Sequence[int], elapsed_s: float, timeout_s: float) -> CollectiveTimeoutError:
    """A deadline passed, and ``missing`` did not come."""
    return CollectiveTimeoutError(
        "the call did not complete before its deadline",
        peers=missing,
        reason=f"it did not come within {timeout_s:g} s",
        elapsed_s=elapsed_s,
        timeout_s=timeout_s,
        advice="Find out what these ranks are doing. Pass timeout= if they may take this long.",
    )


def lost_error(
    error: BaseException, found: Findings, rank: int, elapsed_s: float, timeout_s: float
) -> CommunicationError:
    """A connection closed, or a call of ``rank`` failed on the way with ``error``."""
    facts: dict[str, Any] = {"elapsed_s": elapsed_s, "timeout_s": timeout_s}
    cause = found.cause
    if cause is not None and cause.culprit == rank:
        return PeerLostError.of(cause.rank, f"it gave up rank {rank}: {cause.reason}", **facts)
    if cause is not None:
        return PeerLostError.of(cause.culprit, cause.reason, **facts)
    if len(found.lost) == 1:
        return PeerLostError.of(found.lost[0], ENDED, **facts)
    if found.lost:
        names = ", ".join(map(str, found.lost))
        return PeerLostError(f"lost ranks {names}: they ended, or closed their communicator",
                             peers=found.lost, reason=ENDED, **facts)  # fmt: skip
    what = str(error).partition("\n")[0]
    return PeerLostError(f"the call failed, and no rank is known to be lost: {what}", silent=found.silent, **facts)
