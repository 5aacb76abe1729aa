"""A transport that compares what ranks are about to do before they do it.

On a backend that cannot see a disagreement, another size kills the process and another
dtype gives rubbish. So every call first exchanges a fingerprint of fixed size on a
transport of its own, and the data call starts only when the fingerprints fit. Nothing
blocks in ``start``: a program that is correct without these checks is correct with
them, only slower. For debugging (``BAGUA_DEBUG=1``).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Set as AbstractSet

import torch
from torch.distributed import PrefixStore

from bagua.comm.call import KIND_NUMBERS, KINDS, POINT_TO_POINT, Call
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.contract import DONE, Data, Handle, Joined, Transport
from bagua.comm.transports.memory.line import Deadline
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError

_FACTS = 6
_SENDS, _RECEIVES = KIND_NUMBERS["send"], KIND_NUMBERS["recv"]
_FAREWELL_S = 1.0

_ADVICE = "Make all ranks issue the same calls in the same order; the calls before this one are listed below."
_POLL_S = 0.0002
#: Time between two looks for the rank that sends to a receive from any.
_LOOK_S = 0.002
_RECEIVE = "recv"


def fingerprint_of(call: Call, size: int, kind: int) -> torch.Tensor:
    """``call`` in ``_FACTS + 2 * size`` whole numbers; the counts only where they matter."""
    facts = [kind, call.sequence, *call.numbers()[1:]]
    counts = [*call.send_counts, *call.recv_counts] if call.kind == "alltoall_v" else [0] * (2 * size)
    return torch.tensor(facts + counts, dtype=torch.int64, device="cpu")


def _describe(row: list[int], size: int) -> str:
    """The call behind a fingerprint, for people."""
    kind, sequence, *others = row[:_FACTS]
    counts = tuple(row[_FACTS : _FACTS + size]) if KINDS[kind] == "alltoall_v" else ()
    return str(Call.of_numbers([kind, *others], sequence, -1, counts))


class CollectiveFingerprints:
    """The fingerprints of a collective: all ranks see all of them, so all raise together."""

    def __init__(self, check: Transport, call: Call, timeout_s: float) -> None:
        self._check = check
        self._rank = check.rank
        self._size = check.size
        self._ranks = check.membership.ranks
        self._timeout_s = timeout_s
        self._own = fingerprint_of(call, check.size, KIND_NUMBERS[call.kind])
        self._rows = torch.empty((check.size, self._own.numel()), dtype=torch.int64, device="cpu")
        self._handle: Handle = DONE

    def tell(self) -> None:
        """Tell all ranks, in the order of the calls."""
        gathering = Call("allgather", int(self._own[1]), torch.int64, self._own.numel())
        self._handle = self._check.start(gathering, self._own, self._rows, self._timeout_s, True)

    def arrived(self) -> bool:
        return self._handle.is_completed()

    def compare(self) -> None:
        """Raise if any two ranks disagree."""
        self._handle.wait()
        rows = self._rows.tolist()
        mine = rows[self._rank]
        unlike = [rank for rank, row in enumerate(rows) if row[:_FACTS] != mine[:_FACTS]]
        if unlike:
            ranks = self._ranks
            seen = "; ".join(f"rank {ranks[rank]}: {_describe(rows[rank], self._size)}" for rank in unlike)
            self._wait_for_all()
            peers = [ranks[rank] for rank in unlike]
            raise _mismatch("ranks are about to do different things", _describe(mine, self._size), seen, peers)
        self._compare_counts(rows)

    def _compare_counts(self, rows: list[list[int]]) -> None:
        for sender, receiver in itertools.product(range(self._size), repeat=2):
            sent = rows[sender][_FACTS + receiver]
            expected = rows[receiver][_FACTS + self._size + sender]
            if sent != expected:
                names = self._ranks[sender], self._ranks[receiver]
                sides = (
                    f"rank {names[0]} sends {sent} elements to rank {names[1]}",
                    f"rank {names[1]} expects {expected} elements from rank {names[0]}",
                )
                own, other = sides if self._rank != receiver else sides[::-1]
                peer = sender if self._rank == receiver else receiver
                self._wait_for_all()
                raise _mismatch("the counts of alltoall_v do not fit together", own, other, [self._ranks[peer]])

    def _wait_for_all(self) -> None:
        """Until every rank has seen the disagreement: the error closes the connections."""
        with contextlib.suppress(CommunicationError):
            self._check.start(Call("barrier", 0, torch.uint8), None, None, _FAREWELL_S, True).wait()

    def give_up(self) -> None:
        """The deadline has passed: let the transport say who is missing."""
        self._handle.wait(0.001)


class FingerprintExchange:
    """Fingerprints of messages: who sends tells the receiver, and the other way round.

    Between two ranks the n-th fingerprint of a sender belongs to the n-th of the
    receiver, whatever order the two call in; so arrivals are sorted by role. One is
    expected from a rank only while a call waits for it: what is left at the end would
    look like a call under way.
    """

    def __init__(self, check: Transport) -> None:
        self.check = check
        self._numbers = itertools.count(1)
        self._coming: dict[int, tuple[Handle, torch.Tensor]] = {}
        self._arrived: dict[tuple[int, int], deque[list[int]]] = {}
        #: Handles of what was sent are kept until they are complete.
        self._going: list[Handle] = []
        #: How many messages each rank has begun to send to each other, for those who receive from any rank.
        self._board = PrefixStore("sent", check.membership.store)
        self._received: Counter[int] = Counter()

    def tell(self, peer: int, fingerprint: torch.Tensor, timeout_s: float) -> None:
        """Send ``fingerprint`` to ``peer``."""
        sending = Call("send", next(self._numbers), torch.int64, fingerprint.numel(), "", peer)
        self._going = [sent for sent in self._going if not sent.is_completed()]
        self._going.append(self.check.start(sending, fingerprint, None, timeout_s, True))
        if fingerprint[0] == _SENDS:
            self._board.add(self._entry(self.check.rank, peer), 1)
        else:
            self._received[peer] += 1

    def take(self, peer: int, role: int, like: torch.Tensor, timeout_s: float) -> list[int] | None:
        """The next fingerprint of ``peer`` in ``role``; None if it has yet to arrive."""
        self._collect(peer)
        arrived = self._arrived.get((peer, role))
        if arrived:
            return arrived.popleft()
        if peer not in self._coming:
            receiving = Call("recv", next(self._numbers), torch.int64, like.numel(), "", peer)
            row = torch.empty_like(like)
            self._coming[peer] = self.check.start(receiving, None, row, timeout_s, True), row
        return None

    def _collect(self, peer: int) -> None:
        """Sort what has arrived from ``peer``."""
        if peer in self._coming and self._coming[peer][0].is_completed():
            handle, answer = self._coming.pop(peer)
            handle.wait()
            row = answer.tolist()
            self._arrived.setdefault((peer, row[0]), deque()).append(row)

    def sender(self, without: Collection[int]) -> int | None:
        """A rank, none of ``without``, that sends what no receive has been started for; None if there is none."""
        rank = self.check.rank
        for peer in range(self.check.size):
            if peer == rank or peer in without:
                continue
            if self._board.add(self._entry(peer, rank), 0) > self._received[peer]:
                return peer
        return None

    def _entry(self, sender: int, receiver: int) -> str:
        return f"{sender} to {receiver}"

    def flush(self) -> None:
        """Until the peers have what was sent: the error that follows closes the connections."""
        with contextlib.suppress(CommunicationError):
            for sent in self._going:
                sent.wait(_FAREWELL_S)

    def give_up(self, peer: int) -> None:
        """The deadline has passed: let the transport say so."""
        if peer in self._coming:
            self._coming[peer][0].wait(0.001)


class MessageFingerprints:
    """The fingerprint of a message, and the one that must fit.

    Args:
        messages: fingerprints of messages of the communicator.
        call: a send, or a receive from a rank that is named.
        timeout_s: until its deadline.
    """

    def __init__(self, messages: FingerprintExchange, call: Call, deadline: Deadline) -> None:
        self._messages = messages
        self._peer = call.root
        self._role = KIND_NUMBERS[call.kind]
        self._deadline = deadline
        self._own = fingerprint_of(call, messages.check.size, self._role)
        self._theirs: list[int] | None = None
        self._told = False

    def tell(self) -> None:
        """Tell the other rank, once."""
        if not self._told:
            self._told = True
            self._messages.tell(self._peer, self._own, self._deadline.limit_s)

    def arrived(self) -> bool:
        """Whether the other rank has told what it does. It is asked for until it has."""
        if self._theirs is None:
            opposite = _RECEIVES if self._role == _SENDS else _SENDS
            self._theirs = self._messages.take(self._peer, opposite, self._own, self._deadline.limit_s)
        return self._theirs is not None

    def compare(self) -> None:
        """Raise if the other rank moves something else."""
        own, theirs, size = self._own.tolist(), self._theirs, self._messages.check.size
        assert theirs is not None
        if own[2:4] != theirs[2:4]:  # dtype and number of elements
            name = self._messages.check.membership.ranks[self._peer]
            seen = f"rank {name}: {_describe(theirs, size)}"
            self._messages.flush()
            raise _mismatch("sender and receiver disagree", _describe(own, size), seen, [name])

    def give_up(self) -> None:
        """The deadline has passed."""
        self._messages.give_up(self._peer)


def _mismatch(problem: str, own: str, other: str, peers: list[int]) -> CollectiveMismatchError:
    return CollectiveMismatchError(problem, expected=own, seen=other, peers=peers, advice=_ADVICE)


class CheckedTransport(Transport):
    """Calls on ``data``, after their fingerprints have been compared on ``check``.

    Args:
        data: the transport that does the work.
        check: one over the same ranks that serves the CPU, with nothing else on it.
    """

    compares_calls = True

    def __init__(self, data: Transport, check: C10dTransport) -> None:
        super().__init__(data.membership)
        self.name = data.name
        self.device_types = data.device_types
        self.executor = data.executor
        self.overlaps = data.overlaps
        self.data = data
        self.check = check
        self.messages = FingerprintExchange(check)
        self._advancing = threading.RLock()
        _living.add(self)
        #: Calls that have not started: collectives in order; messages to, or from, one peer in order.
        self._collectives: deque[CheckedHandle] = deque()
        self._others: list[CheckedHandle] = []

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        if call.kind in POINT_TO_POINT and call.root == self.rank:
            return self.data.start(call, source, target, timeout_s, asynchronous)
        if call.kind == "sendrecv" and source is not None and source.is_cpu:
            # The peer may wait for one half before it begins the other. (On a GPU the halves must start together.)
            sending, receiving = _halves(call)
            return Joined(
                self._start_checked(sending, source, None, timeout_s),
                self._start_checked(receiving, None, target, timeout_s),
            )
        return self._start_checked(call, source, target, timeout_s)

    def _start_checked(self, call: Call, source: Data, target: Data, timeout_s: float) -> Handle:
        with self._advancing:
            handle = CheckedHandle(self, call, source, target, timeout_s)
            if call.kind not in POINT_TO_POINT:
                handle.tell()
                self._collectives.append(handle)
                return handle
            if not any(earlier.any_source for earlier in self._others):
                handle.tell()
            self._others.append(handle)
            return handle

    def advance(self) -> None:
        """Start what can be started, in order."""
        if not self._advancing.acquire(blocking=False):
            return  # Another thread is at it.
        try:
            while self._collectives and self._collectives[0].try_start():
                self._collectives.popleft()
            self._start_messages()
        finally:
            self._advancing.release()

    def _start_messages(self) -> None:
        """Start each message that has no earlier one before it on its way.

        A fingerprint may arrive between two looks: without this rule the second message would take that of the first.
        A receive behind one from any rank tells no rank of itself before that one has found its sender: the next
        message of each rank may be for the earlier one.
        """
        waiting: list[CheckedHandle] = []
        taken: set[tuple[str, int]] = set()
        undecided = False
        for handle in self._others:
            if not undecided or handle.only_sends:
                handle.tell()
            if handle.try_start(taken):
                continue
            undecided |= handle.any_source
            taken |= handle.ways
            waiting.append(handle)
        self._others = waiting

    def abort(self, reason: str, culprit: int | None = None) -> None:
        self.data.abort(reason, culprit)
        self.check.abort(reason, culprit)

    def idle(self) -> bool:
        self.advance()
        return not self._collectives and not self._others and self.data.idle() and self.check.idle()

    def close(self) -> None:
        _living.discard(self)
        self.data.close()
        self.check.close()
        for handle in (*self._collectives, *self._others):
            handle.end(self.check.failures.ended())

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.data.empty(numel, dtype, device)


_living: weakref.WeakSet[CheckedTransport] = weakref.WeakSet()


def _halves(call: Call) -> tuple[Call, Call]:
    """The messages that a ``sendrecv`` is made of."""
    return call._replace(kind="send"), call._replace(kind="recv", root=call.source, numel=call.recv_counts[0])


class CheckedHandle(Handle):
    """A call that starts once its fingerprints were compared: those of all ranks, or of both ends of a message.

    Args:
        transport: transport that starts the call.
        call: call to be started; ``sendrecv`` is two messages that must start together.
        source: see ``Transport.start``.
        target: see ``Transport.start``.
        timeout_s: deadline of the call, from now.

    Attributes:
        any_source: it is a receive that has yet to find its sender.
        only_sends: it receives nothing.
        ways: direction and peer of each message that it is, or may be; empty for a collective.
    """

    __slots__ = (
        *("_call", "_deadline", "_error", "_fingerprints", "_inner", "_look_at", "_tensors"),
        *("_transport", "any_source", "only_sends", "ways"),
    )

    def __init__(self, transport: CheckedTransport, call: Call, source: Data, target: Data, timeout_s: float) -> None:
        self._transport = transport
        self._call = call
        self._tensors = (source, target)
        self._deadline = Deadline.after(timeout_s)
        self._inner: Handle | None = None
        self._error: BaseException | None = None
        self._look_at = 0.0
        self.any_source = call.kind == "recv" and call.root < 0
        self.only_sends = call.kind == "send"
        self._fingerprints: list[CollectiveFingerprints | MessageFingerprints]
        if call.kind not in POINT_TO_POINT:
            self.ways: set[tuple[str, int]] = set()
            self._fingerprints = [CollectiveFingerprints(transport.check, call, timeout_s)]
        elif self.any_source:  # There is nothing to tell before one sends.
            self.ways = {(_RECEIVE, peer) for peer in range(transport.size)}
            self._fingerprints = []
        else:
            halves = _halves(call) if call.kind == "sendrecv" else (call,)
            self.ways = {(half.kind, half.root) for half in halves}
            self._fingerprints = [MessageFingerprints(transport.messages, half, self._deadline) for half in halves]

    def tell(self) -> None:
        """Tell the peers, once."""
        for one in self._fingerprints:
            one.tell()

    def try_start(self, taken: AbstractSet[tuple[str, int]] = frozenset()) -> bool:
        """Start the data call if the fingerprints are there; True if this handle is done with them.

        Args:
            taken: ways on which an earlier message has yet to start.
        """
        if self._inner is not None or self._error is not None:
            return True
        try:
            if not self._compared(taken):
                return False
            self._inner = self._transport.data.start(self._call, *self._tensors, self._deadline.limit_s, True)
        except Exception as error:  # noqa: BLE001  # the one who waits raises it
            self._error = error
        return True

    def end(self, error: BaseException) -> None:
        """The transport was closed, so nothing starts any more."""
        if self._inner is None and self._error is None:
            self._error = error

    def wait(self, timeout_s: float | None = None) -> None:
        until = self._deadline if timeout_s is None else min(self._deadline, Deadline.after(timeout_s))
        while not self.is_completed() and until.left_s > 0:
            time.sleep(_POLL_S)
        if self._error is not None:
            raise self._error
        if self._inner is None:
            self._give_up()
            # The peers have told what they do, and it is not this.
            limit_s = self._deadline.timeout_s if timeout_s is None else timeout_s
            raise CollectiveTimeoutError("the call did not complete in time", timeout_s=limit_s)
        self._inner.wait(until.limit_s)

    def is_completed(self) -> bool:
        # All of them: a peer may wait for a call that this rank made on another communicator.
        for transport in list(_living):
            transport.advance()
        return self._error is not None or (self._inner is not None and self._inner.is_completed())

    @property
    def failed(self) -> bool:
        return self._error is not None or (self._inner is not None and self._inner.failed)

    def _compared(self, taken: AbstractSet[tuple[str, int]]) -> bool:
        """Whether all that must fit has arrived, and fits."""
        if self.any_source:
            self._find_sender(taken)
        if self.any_source or not taken.isdisjoint(self.ways) or not self._arrived():
            return False
        for one in self._fingerprints:
            one.compare()
        return True

    def _arrived(self) -> bool:
        # Each is asked, whatever the others say: asking is what brings the answer.
        return False not in [one.arrived() for one in self._fingerprints]

    def _find_sender(self, taken: AbstractSet[tuple[str, int]]) -> None:
        """From the rank that is found on it is a receive from that rank."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_S
        peer = self._transport.messages.sender({peer for kind, peer in taken if kind == _RECEIVE})
        if peer is None:
            self._require_peers()
            return
        sender, target = self._tensors
        assert sender is not None
        sender.fill_(peer)
        self._tensors = None, target
        self._call = self._call._replace(root=peer)
        self.any_source, self.ways = False, {(_RECEIVE, peer)}
        self._fingerprints = [MessageFingerprints(self._transport.messages, self._call, self._deadline)]
        self.tell()

    def _require_peers(self) -> None:
        """Raise if a peer ended the communicator: no connection is waited on that would tell."""
        failures = self._transport.check.failures
        failures.check_usable()
        if failures.peers_left():
            timeout_s = self._deadline.timeout_s
            raise failures.failed(ConnectionError("a peer left"), timeout_s - self._deadline.left_s, timeout_s)

    def _give_up(self) -> None:
        """The deadline has passed: let the transport of the fingerprints say who is missing, if it knows."""
        if self.any_source:
            raise CollectiveTimeoutError("no rank has sent a message", timeout_s=self._deadline.timeout_s)
        for one in self._fingerprints:
            one.give_up()
