"""A transport that compares what ranks are about to do before they do it.

On a backend that cannot see a disagreement, another size kills the process and another
dtype gives rubbish. So every call first exchanges a fingerprint of fixed size on a
transport of its own, and the data call starts only when the fingerprints fit. Nothing
blocks in ``start``: a program that is correct without these checks is correct with
them, only slower. For debugging (``BAGUA_DEBUG=1``).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Set as AbstractSet

import torch

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.transports.base import Handle, Joined, Transport
from bagua.comm.transports.c10d.transport import C10dTransport
from bagua.comm.transports.fingerprints import CollectiveFingerprints, FingerprintExchange, MessageFingerprints
from bagua.errors import CollectiveTimeoutError

_POLL_S = 0.0002
#: Time between two looks for the rank that sends to a receive from any.
_LOOK_S = 0.002
_RECEIVES = "recv"


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

    def start(
        self,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
        asynchronous: bool,
    ) -> Handle:
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

    def _start_checked(
        self, call: Call, source: torch.Tensor | None, target: torch.Tensor | None, timeout_s: float
    ) -> Handle:
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
        *("_call", "_deadline", "_error", "_fingerprints", "_inner", "_look_at", "_tensors", "_timeout_s"),
        *("_transport", "any_source", "only_sends", "ways"),
    )

    def __init__(
        self,
        transport: CheckedTransport,
        call: Call,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        timeout_s: float,
    ) -> None:
        self._transport = transport
        self._call = call
        self._tensors = (source, target)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
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
            self.ways = {(_RECEIVES, peer) for peer in range(transport.size)}
            self._fingerprints = []
        else:
            halves = _halves(call) if call.kind == "sendrecv" else (call,)
            self.ways = {(half.kind, half.root) for half in halves}
            self._fingerprints = [MessageFingerprints(transport.messages, half, timeout_s) for half in halves]

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
            self._inner = self._transport.data.start(self._call, *self._tensors, self._left_s(), True)
        except Exception as error:  # noqa: BLE001  # the one who waits raises it
            self._error = error
        return True

    def end(self, error: BaseException) -> None:
        """The transport was closed, so nothing starts any more."""
        if self._inner is None and self._error is None:
            self._error = error

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    def wait(self, timeout_s: float | None = None) -> None:
        until = self._deadline if timeout_s is None else min(self._deadline, time.monotonic() + timeout_s)
        while not self.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if self._error is not None:
            raise self._error
        if self._inner is None:
            self._give_up()
            # The peers have told what they do, and it is not this.
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            raise CollectiveTimeoutError("the call did not complete in time", timeout_s=limit_s)
        self._inner.wait(max(until - time.monotonic(), 0.001))

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
        peer = self._transport.messages.sender({peer for kind, peer in taken if kind == _RECEIVES})
        if peer is None:
            self._require_peers()
            return
        sender, target = self._tensors
        assert sender is not None
        sender.fill_(peer)
        self._tensors = None, target
        self._call = self._call._replace(root=peer)
        self.any_source, self.ways = False, {(_RECEIVES, peer)}
        self._fingerprints = [MessageFingerprints(self._transport.messages, self._call, self._left_s())]
        self.tell()

    def _require_peers(self) -> None:
        """Raise if a peer ended the communicator: no connection is waited on that would tell."""
        failures = self._transport.check.failures
        failures.check_usable()
        if failures.peers_left():
            elapsed_s = self._timeout_s - self._left_s()
            raise failures.failed(ConnectionError("a peer left"), elapsed_s, self._timeout_s)

    def _give_up(self) -> None:
        """The deadline has passed: let the transport of the fingerprints say who is missing, if it knows."""
        if self.any_source:
            raise CollectiveTimeoutError("no rank has sent a message", timeout_s=self._timeout_s)
        for one in self._fingerprints:
            one.give_up()
