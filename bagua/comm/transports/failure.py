"""One communicator's failure: found out once, told to the other ranks, and raised by every call afterwards.

Gloo and NCCL say that a connection broke, not which rank died. So each rank keeps a listening
socket for each communicator, its mailbox. No thread serves it, and it costs nothing while all is well:

* The kernel accepts connections to a mailbox as long as the rank has the communicator open,
  whatever the rank does meanwhile, even while its process is stopped. As soon as the process
  ends, or closes the communicator, the kernel refuses them.
* A notice that was written to a mailbox waits in the kernel of the reader. A rank that knows the
  cause can tell the others, raise its error and end; they read the notice when their calls fail.
* A rank that closes with no call under way says so. More closed connections than such notices mean that a rank died:
  Gloo does not tell a call that sends to it.

None of this needs the store, whose host may be the rank that died, or the first that gave up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from bagua.comm.addresses import LOOPBACK, listen, own_address
from bagua.comm.call import Call
from bagua.comm.lifetime.forks import family
from bagua.comm.long_wait import LongWait
from bagua.comm.store.asking import gather_values
from bagua.comm.transports.contract import Membership
from bagua.errors import (
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    PeerLostError,
    TransportUnavailableError,
    relayed,
)

#: How long ranks that are alive have to say that their call failed, too.
ATTENDANCE_S = 0.6
#: How long one round of connections may take. Ranks that are alive answer in one round trip.
_ROUND_S = 0.3
#: What had come before the last connection closed was taken in by so much later.
_CLOSED_S = 1.0
#: Connections that are open at a time.
_BATCH = 128
#: A notice is cut to this; one write of so few bytes never blocks.
_NOTICE_BYTES = 2048
#: Not epoll, which needs a descriptor of its own: notices must leave also where too many files are open.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)


class Cause(NamedTuple):
    """Why a communicator broke. All ranks are global ranks.

    Attributes:
        rank: who says so.
        culprit: the rank to blame.
        kind: ``aborted``, ``timed out``, ``closed``, ``failed`` or ``lost``.
        reason: deed of the culprit; begins with "it".
        waited_s: seconds that ``rank`` had waited when it gave up.
    """

    rank: int
    culprit: int
    kind: str
    reason: str
    waited_s: float = 0.0


class Findings(NamedTuple):
    """What a rank found out about the others. All ranks are global ranks.

    Attributes:
        cause: content of the first notice, if one came.
        lost: ranks that ended, or closed the communicator.
        silent: ranks that sent no notice and are not known to be lost: those of a host that never answered are here,
            because a firewall refuses connections, too.
        late: ranks that came when others had given up.
    """

    cause: Cause | None = None
    lost: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


class _Address(NamedTuple):
    host: str
    port: int
    token: str


class Mailbox:
    """The mailbox of one rank of a communicator, and the way to those of the others.

    Args:
        membership: the ranks.

    Raises:
        TransportUnavailableError: the system gives no socket.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._others = [rank for rank in range(membership.size) if rank != membership.rank]
        self._token = secrets.token_hex(8)
        self._addresses: dict[int, _Address] = {}
        #: Hosts whose mailboxes were reached once: elsewhere a refusal proves nothing.
        self._reached: set[int] = set()
        self._heard, self._late = set[int](), set[int]()
        #: Ranks that closed with no call under way.
        self.left = set[int]()
        self._cause: Cause | None = None
        self._reading = threading.Lock()
        self._letters: list[tuple[socket.socket, bytearray]] = []
        try:
            self._listener = listen(LOOPBACK if len(set(membership.nodes)) == 1 else own_address())
        except OSError as error:
            raise TransportUnavailableError(
                f"no socket for {membership.label}: {error}",
                rank=membership.ranks[membership.rank],
                advice="Raise `ulimit -n` if there are too many open files.",
            ) from error
        family.add(self)

    # Setting up.

    def meet(self) -> None:
        """Wait for all ranks, and learn where their mailboxes are. Collective.

        Unlike the connection set-up of backends, this can be interrupted with Ctrl-C.

        Raises:
            CollectiveTimeoutError: some ranks did not come.
        """
        members = self._membership
        host, port = self._listener.getsockname()[:2]
        answers = gather_values(
            members.store,
            f"the set-up of communicator {members.label}",
            members.rank,
            members.ranks,
            _Address(host, port, self._token),
            members.timeout_s,
            advice="Every member must make the same groups in the same order.",
        )
        self._addresses = {rank: _Address(*answer) for rank, answer in enumerate(answers)}
        firsts = {members.nodes[rank]: rank for rank in reversed(self._others)}
        reached = self._reach(firsts.values(), b"")
        self._reached = {members.nodes[rank] for rank, answered in reached.items() if answered}

    # Notices.

    def tell(self, cause: Cause | None, *, late: bool = False, leaves: bool = False) -> None:
        """Tell all other ranks that calls fail here, and why if that is known. Never raises, never blocks for long.

        Args:
            cause: why, if that is known.
            late: this rank came when others had given up.
            leaves: this rank closes with no call under way; nothing has failed.
        """
        rank = self._membership.rank
        content = {"rank": rank, "cause": cause and _shortened(cause), "late": late, "leaves": leaves}
        self._reach(self._others, json.dumps(content).encode())

    def cause(self) -> Cause | None:
        """What the first notice with a cause says. Does not wait."""
        if self._reading.acquire(blocking=False):  # Another thread that reads finds what there is.
            try:
                self._read()
            finally:
                self._reading.release()
        return self._cause

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # No more of them, or closed meanwhile.
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._letters.append((connection, bytearray()))
        self._letters = [letter for letter in self._letters if not self._complete(*letter)]

    def _complete(self, connection: socket.socket, text: bytearray) -> bool:
        """Read on; whether nothing more will come."""
        try:
            while part := connection.recv(_NOTICE_BYTES):
                text += part
                if len(text) > 4 * _NOTICE_BYTES:
                    break
        except BlockingIOError:
            return False
        except OSError:
            text.clear()
        connection.close()
        self._note(bytes(text))
        return True

    def _note(self, text: bytes) -> None:
        token, _, notice = text.partition(b"\n")
        if token.decode(errors="replace") != self._token:
            return  # Empty, from a rank that only looked whether this one is there; or a stranger's.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            content = json.loads(notice)
            rank = int(content["rank"])
            (self.left if content.get("leaves") else self._heard).add(rank)
            if content.get("late"):
                self._late.add(rank)
            if content["cause"] is not None and self._cause is None:
                self._cause = Cause(*content["cause"])

    # Finding out.

    def look(self) -> Findings:
        """What can be known at once: the notices that came, and who refuses connections."""
        cause = self.cause()
        return Findings(cause) if cause is not None else self._findings(self._reach(self._unheard(), b""))

    def find_out(self, everyone: bool = False) -> Findings:
        """Wait until a cause or a lost rank is known, or every rank was heard; at most ``ATTENDANCE_S``.

        Args:
            everyone: go on until all ranks that are not lost were heard.
        """
        deadline = time.monotonic() + ATTENDANCE_S
        pause_s = 0.001
        while True:
            found = self._findings(self._reach(self._unheard(), b""))
            enough = not everyone and (found.cause is not None or found.lost)
            if enough or not found.silent or time.monotonic() >= deadline:
                return found
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _findings(self, answers: dict[int, bool | None]) -> Findings:
        """What ``answers`` of ranks that were not heard mean, and what was read since."""
        cause, members = self.cause(), self._membership
        unheard = [rank for rank in answers if rank not in self._heard]
        lost = [rank for rank in unheard if answers[rank] is False and members.nodes[rank] in self._reached]
        silent = [rank for rank in unheard if rank not in lost]
        return Findings(cause, *(tuple(members.ranks[rank] for rank in found) for found in (lost, silent, self._late)))

    def _unheard(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._heard]

    def _reach(self, ranks: Iterable[int], notice: bytes) -> dict[int, bool | None]:
        """Connect to the mailboxes of ``ranks``, and write ``notice``.

        Returns:
            For each rank whether it answered; None if no rank said anything.
        """
        answers: dict[int, bool | None] = {}
        ranks, deadline = list(ranks), time.monotonic() + _ROUND_S
        for start in range(0, len(ranks), _BATCH):
            batch = {rank: self._addresses.get(rank) for rank in ranks[start : start + _BATCH]}
            answers |= _Round(batch, notice).run(deadline)
        return answers

    # The end.

    def close(self) -> None:
        """Refuse connections from now on. Idempotent."""
        self._listener.close()
        for connection, _ in self._letters:
            connection.close()

    #: In a forked child: do not make the parent look alive when it is gone.
    disown = close


class _Round:
    """Connections to some mailboxes at the same time."""

    def __init__(self, addresses: dict[int, _Address | None], notice: bytes) -> None:
        self._notice = notice
        self._answers: dict[int, bool | None] = dict.fromkeys(addresses)
        self._addresses = addresses

    def run(self, deadline: float) -> dict[int, bool | None]:
        """Connect, write, close; what each rank answered."""
        with _Selector() as selector:
            for rank, address in self._addresses.items():
                if address is not None:
                    self._begin(selector, rank, address)
            while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    selector.unregister(key.fileobj)
                    assert isinstance(key.fileobj, socket.socket)
                    self._settle(key.data, key.fileobj, key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()
        return self._answers

    def _begin(self, selector: selectors.BaseSelector, rank: int, address: _Address) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # Too many open files: nothing can be said of this rank.
            return
        status = connection.connect_ex((address.host, address.port))
        if status == errno.EINPROGRESS:
            selector.register(connection, selectors.EVENT_WRITE, rank)
        else:
            self._settle(rank, connection, status)

    def _settle(self, rank: int, connection: socket.socket, status: int) -> None:
        address = self._addresses[rank]
        assert address is not None
        if status == 0:
            self._answers[rank] = True
            if self._notice:
                with contextlib.suppress(OSError):  # It ended a moment ago.
                    connection.send(address.token.encode() + b"\n" + self._notice)
        elif status == errno.ECONNREFUSED:
            self._answers[rank] = False
        connection.close()


def _shortened(cause: Cause) -> Cause:
    encoded = cause.reason.encode(errors="backslashreplace")[: _NOTICE_BYTES // 4]
    return cause._replace(reason=encoded.decode(errors="ignore"))


#: What is known of a rank that refuses connections.
ENDED = "it ended, or closed its communicator"


class FailureFinder:
    """Finds out which rank ended a communicator, for transports that only see broken connections.

    Args:
        membership: the ranks. Building this is collective among them.
        disconnect: closes all connections of the transport, so that calls under way end here and on the peers; runs
            once, in any thread, and raises nothing.
        count_closed: how many connections have closed, as far as that is known.

    Raises:
        TransportUnavailableError: the system gives no socket.
        CollectiveTimeoutError: some ranks never came; ``peers`` names them.
    """

    def __init__(self, membership: Membership, disconnect: Callable[[], None], count_closed: Callable[[], int]) -> None:
        self._membership = membership
        self.judge = membership.judge
        self._disconnect, self._count_closed = disconnect, count_closed
        #: How many connections had closed when they were counted, and since when it is so many.
        self._closed = (0, 0.0)
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
        """Whether a peer sent a notice of why it left, or connections closed a while ago and no notice says why.

        Who closed in peace has its part of a call that goes on, or Gloo tells the call.
        """
        count, now = self._count_closed(), time.monotonic()
        if count != self._closed[0]:
            self._closed = (count, now)
        return self._mailbox.cause() is not None or (
            count > len(self._mailbox.left) and now - self._closed[1] > _CLOSED_S
        )

    def warn_of(self, wait: LongWait, call: Call | None) -> None:
        """Say for whom this rank waits in ``call``. Which of them has not come is not known."""
        members = self._membership
        others = [rank for rank in members.ranks if rank != self._global_rank]
        where = ", ".join(text for text in (str(members.activity), str(call or ""), f"on {members.label}") if text)
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
        """The communicator is closed here: later calls say so, and peers are told."""
        cause = self._own_cause("closed", "it closed its communicator")
        if under_way:
            self._break(cause, announce=True)
        elif self._cause is None:
            self._cause = cause
            if self._membership.size > 2:  # Of two ranks, the connection that closes says as much.
                self._mailbox.tell(None, leaves=True)

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
