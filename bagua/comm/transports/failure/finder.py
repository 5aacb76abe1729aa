"""One communicator's failure: found out once, told to the other ranks, and raised by every call afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from bagua.comm.long_wait import LongWait
from bagua.comm.transports.base import Membership
from bagua.comm.transports.failure.notices import Cause, Findings, Mailbox
from bagua.errors import CollectiveTimeoutError, CommunicationError, CommunicatorClosedError, PeerLostError

#: What is known of a rank that refuses connections.
ENDED = "it ended, or closed its communicator"


class FailureFinder:
    """Finds out which rank ended a communicator, for transports that only see broken connections.

    Args:
        membership: the ranks. Building this is collective among them.
        disconnect: closes all connections of the transport, so that calls under way end here and on the peers; runs
            once, in any thread, and raises nothing.

    Raises:
        TransportUnavailableError: the system gives no socket.
        CollectiveTimeoutError: some ranks never came; ``peers`` names them.
    """

    def __init__(self, membership: Membership, disconnect: Callable[[], None]) -> None:
        self._membership = membership
        self._disconnect = disconnect
        self._global_rank = membership.ranks[membership.rank]
        # A signal handler may abort or close in the middle of either.
        self._lock = threading.RLock()
        self._verdict = threading.RLock()
        self._cause: Cause | None = None
        self._error: CommunicationError | None = None
        self._mailbox = Mailbox(membership)
        try:
            self._mailbox.meet()
        except BaseException:
            self._mailbox.close()
            raise

    def not_connected(self, error: CommunicationError) -> CommunicationError:
        """What to raise because connections could not be made: who is lost, if that can be known; else ``error``.

        This rank is about to close its mailbox, and says first that it is not lost itself.
        """
        self._mailbox.tell(None)
        found = self._mailbox.find_out()
        if found.cause is None and not found.lost:
            return error
        lost = lost_error(error, found, self._global_rank, error.elapsed_s or 0.0, self._membership.timeout_s)
        lost.rank, lost.communicator = self._global_rank, self._membership.label
        return lost

    @property
    def broken(self) -> bool:
        """Whether the communicator was broken or closed."""
        return self._cause is not None

    def check_usable(self) -> None:
        """Raise if this communicator was broken or closed."""
        if self._cause is None:
            return
        with self._verdict:
            error, self._error = self._error, None
        raise error or self.ended()

    def ended(self) -> CommunicationError:
        """The error of a call on the communicator that has ended."""
        assert self._cause is not None
        return ended_error(self._cause, self._global_rank)

    def peers_left(self) -> bool:
        """Whether a peer sent a notice of why it left."""
        return self._mailbox.cause() is not None

    def warn_of(self, wait: LongWait) -> None:
        """Say for whom this rank waits. Which of them has not come is not known."""
        members = self._membership
        others = [rank for rank in members.ranks if rank != self._global_rank]
        where = ", ".join(text for text in (str(members.activity), f"on {members.label}") if text)
        which = "; which of them is late is not known" if len(others) > 1 else ""
        wait.warn(self._global_rank, others, f"in {where}{which}")

    # What a call has met.

    def timed_out(self, elapsed_s: float, timeout_s: float) -> CommunicationError:
        """End the communicator because a deadline passed; the error to raise."""
        if not self._break(self._own_cause("timed out", f"it gave up after {elapsed_s:.1f} s"), announce=True):
            return self.ended()
        return self._timeout_error(elapsed_s, timeout_s)

    def _timeout_error(self, elapsed_s: float, timeout_s: float) -> CommunicationError:
        found = self._mailbox.find_out(everyone=True)
        return timeout_error(sorted(found.lost + found.silent), elapsed_s, timeout_s)

    def failed(self, error: BaseException, elapsed_s: float, timeout_s: float) -> CommunicationError:
        """End the communicator because a call failed; the error to raise."""
        found = self._mailbox.look()
        cause = self._named(found)
        if not self._break(cause or self._own_cause("failed", f"its call failed: {error}"), announce=cause is not None):
            return self.ended()
        if cause is None:
            # Who died a moment ago may still answer; those who are well say so as soon as their calls fail.
            self._mailbox.tell(None)
            found = self._mailbox.find_out()
            cause = self._named(found)
            if cause is not None:
                self._cause = cause  # Other calls that were under way name the same rank.
                if cause.rank == self._global_rank:
                    self._mailbox.tell(cause)
        if cause is not None and cause.kind == "timed out" and elapsed_s >= timeout_s / 2:
            # This rank waited as well; the other one's clock was only a little ahead.
            self._mailbox.tell(None)
            return self._timeout_error(elapsed_s, timeout_s)
        return lost_error(error, found, self._global_rank, elapsed_s, timeout_s)

    def _named(self, found: Findings) -> Cause | None:
        """The cause, if a notice or a refused connection names a rank."""
        if found.cause is None and found.lost:
            return Cause(self._global_rank, found.lost[0], "lost", ENDED)
        return found.cause

    def _own_cause(self, kind: str, reason: str) -> Cause:
        return Cause(self._global_rank, self._global_rank, kind, reason)

    def end_unattended(self, judge: Callable[[], CommunicationError]) -> None:
        """End the communicator with ``judge()``, which the next call or wait raises; no thread waits for the call."""
        with self._verdict:  # Who comes meanwhile waits for the verdict.
            self._error = judge()

    def _break(self, cause: Cause, *, announce: bool) -> bool:
        """Close all connections; False if that has happened before."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = cause
        try:
            if announce:
                # Before the connections close: a rank that this wakes looks for the cause.
                self._mailbox.tell(cause)
        finally:
            self._disconnect()
        return True

    # The end.

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """See ``Transport.abort``."""
        own = self._own_cause("aborted", reason)
        self._break(own if culprit is None else own._replace(culprit=culprit), announce=True)

    def end(self, *, under_way: bool) -> None:
        """The communicator is closed here: later calls say so, and with calls under way the peers are told."""
        cause = self._own_cause("closed", "it closed its communicator")
        if under_way:
            self._break(cause, announce=True)
        elif self._cause is None:
            self._cause = cause

    def close(self) -> None:
        """Refuse connections from now on. Idempotent."""
        self._mailbox.close()

    def disown(self) -> None:
        """In a forked child: say nothing to anybody."""
        self._lock, self._verdict = threading.RLock(), threading.RLock()
        self._cause = self._cause or self._own_cause("forked", "the communicator is the parent's")


# What a broken connection meant, in the words of ``bagua.errors``.


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
