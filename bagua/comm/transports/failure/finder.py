"""One communicator's failure: found out once, told to the other ranks, and raised by every call afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from bagua.comm.long_wait import LongWait
from bagua.comm.transports.contract import Membership
from bagua.comm.transports.failure.notices import Cause, Findings, Mailbox
from bagua.errors import CollectiveTimeoutError, CommunicationError, CommunicatorClosedError, PeerLostError, relayed

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
        self.judge = membership.judge
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

    def timed_out(
        self, elapsed_s: float, timeout_s: float, *, peer: int | None = None, impatient: bool = False
    ) -> CommunicationError:
        """End the communicator because this rank waits no longer; the error to raise.

        Args:
            elapsed_s: seconds since the call was started.
            timeout_s: deadline of the call, in seconds.
            peer: the one rank that the call waited for, inside the communicator; None for a collective.
            impatient: the deadline has not passed; the caller waited for less.
        """
        late = () if peer is None else (self._membership.ranks[peer],)
        error = CollectiveTimeoutError.of(late, timeout_s, self._global_rank, elapsed_s=elapsed_s, timeout_s=timeout_s)
        if impatient:
            cause = self._own_cause("aborted", f"it gave up after a wait of {elapsed_s:.1f} s")
        elif late:
            cause = Cause(self._global_rank, *late, "late", error.reason)
        else:
            cause = self._own_cause("timed out", "it gave up")._replace(waited_s=elapsed_s)
        if not self._break(cause, announce=True):
            return self.ended()
        return error if late else self._timeout_error(elapsed_s, timeout_s, late=False)

    def _timeout_error(self, elapsed_s: float, timeout_s: float, *, late: bool) -> CommunicationError:
        """What each rank raises when all know that a deadline passed: who is late, unless a rank has died."""
        found = self._mailbox.find_out(everyone=True)
        told = found.cause is not None and found.cause.kind != "timed out" and found.cause.rank != self._global_rank
        known = found.cause if told else None
        if known is not None or found.lost:
            problem = TimeoutError("the deadline passed")
            return lost_error(problem, found._replace(cause=known), self._global_rank, elapsed_s, timeout_s)
        missing = {*found.silent, *found.late, *([self._global_rank] if late else [])}
        return CollectiveTimeoutError.of(
            sorted(missing), timeout_s, self._global_rank, elapsed_s=elapsed_s, timeout_s=timeout_s
        )

    def failed(self, error: BaseException, elapsed_s: float, timeout_s: float) -> CommunicationError:
        """End the communicator because a call failed; the error to raise."""
        found = self._mailbox.look()
        cause = self._named(found)
        own = self._own_cause("failed", f"its call failed: {error}")
        if not self._break(cause or own, announce=cause is not None, late=_is_late(cause, elapsed_s)):
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
        if cause is not None and cause.kind == "timed out":
            return self._timeout_error(elapsed_s, timeout_s, late=_is_late(cause, elapsed_s))
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

    def _break(self, cause: Cause, *, announce: bool, late: bool = False) -> bool:
        """Close all connections; False if that has happened before."""
        with self._lock:
            if self._cause is not None:
                return False
            self._cause = cause
        try:
            if announce:
                # Before the connections close: a rank that this wakes looks for the cause.
                self._mailbox.tell(cause, late=late)
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


def _is_late(cause: Cause | None, elapsed_s: float) -> bool:
    """Whether a rank whose call failed after ``elapsed_s`` came when others had given up.

    Who came in time has waited about as long as the rank that gave up.
    """
    return cause is not None and elapsed_s < cause.waited_s / 2


# What a broken connection meant, in the words of ``bagua.errors``.


def ended_error(cause: Cause, rank: int) -> CommunicationError:
    """Of a call on a communicator that rank ``rank`` itself ended, earlier or in another thread."""
    if cause.culprit != rank:
        return relayed(cause.culprit, cause.reason, rank)
    return CommunicatorClosedError(f"this rank ended the communicator before ({cause.kind}): {cause.reason}")


def lost_error(
    error: BaseException, found: Findings, rank: int, elapsed_s: float, timeout_s: float
) -> CommunicationError:
    """A connection closed, or a call of ``rank`` failed on the way with ``error``."""
    facts: dict[str, Any] = {"elapsed_s": elapsed_s, "timeout_s": timeout_s}
    cause = found.cause
    if cause is not None:
        return relayed(cause.culprit, cause.reason, rank, teller=cause.rank, **facts)
    if len(found.lost) == 1:
        return PeerLostError.of(found.lost[0], ENDED, **facts)
    if found.lost:
        names = ", ".join(map(str, found.lost))
        return PeerLostError(f"lost ranks {names}: they ended, or closed their communicator",
                             peers=found.lost, reason=ENDED, **facts)  # fmt: skip
    what = str(error).partition("\n")[0]
    return PeerLostError(f"the call failed, and no rank is known to be lost: {what}", silent=found.silent, **facts)
