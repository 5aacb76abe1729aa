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

import torch
from torch.distributed import PrefixStore

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.transports.base import Handle, Membership, Transport
from bagua.comm.transports.fingerprints import (
    AnyMessageFingerprints,
    CollectiveFingerprints,
    FingerprintExchange,
    MessageFingerprints,
    ways_of,
)

__all__ = ["CheckedTransport", "check_membership"]

_POLL_S = 0.0002


def check_membership(membership: Membership) -> Membership:
    """The same ranks with a part of their store for the transport of the fingerprints."""
    return Membership(
        store=PrefixStore("check", membership.store),
        rank=membership.rank,
        ranks=membership.ranks,
        nodes=membership.nodes,
        timeout_s=membership.timeout_s,
        label=f"{membership.label}/check",
    )


class CheckedTransport(Transport):
    """Calls on ``data``, after their fingerprints have been compared on ``check``.

    Args:
        data: the transport that does the work.
        check: another one over the same ranks, with nothing else on it; it serves the CPU.
    """

    compares_calls = True

    def __init__(self, data: Transport, check: Transport) -> None:
        super().__init__(data.membership)
        self.name = data.name
        self.device_types = data.device_types
        self.executor = data.executor
        self.data = data
        self.check = check
        self.messages = FingerprintExchange(check)
        self._advancing = threading.RLock()
        _living.add(self)
        #: Calls that have not started: collectives in order; messages to, or from, one peer in order.
        self._collectives: deque[_CheckedHandle] = deque()
        self._others: list[_CheckedHandle] = []

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
        with self._advancing:
            handle = _CheckedHandle(self, call, source, target, timeout_s)
            if call.kind in POINT_TO_POINT:
                self._others.append(handle)
            else:
                self._collectives.append(handle)
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
        """
        waiting: list[_CheckedHandle] = []
        taken: set[tuple[int, int]] = set()
        for handle in self._others:
            if taken.isdisjoint(handle.ways) and handle.try_start():
                continue
            taken.update(handle.ways)
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

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.data.empty(numel, dtype, device)


_living: weakref.WeakSet[CheckedTransport] = weakref.WeakSet()


class _CheckedHandle(Handle):
    """A call that starts once its fingerprint was compared with everybody's."""

    __slots__ = ("_call", "_comparison", "_deadline", "_error", "_inner", "_tensors", "_transport", "ways")

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
        self._deadline = time.monotonic() + timeout_s
        self._inner: Handle | None = None
        self._error: BaseException | None = None
        #: Peer and direction of a message, or of its two halves.
        self.ways = ways_of(call, transport.rank, transport.size) if call.kind in POINT_TO_POINT else []
        self._comparison: CollectiveFingerprints | MessageFingerprints | AnyMessageFingerprints
        if call.kind == "recv" and call.root < 0:
            self._comparison = AnyMessageFingerprints(transport.messages, call, timeout_s)
        elif call.kind in POINT_TO_POINT:
            self._comparison = MessageFingerprints(transport.messages, call, timeout_s)
        else:
            self._comparison = CollectiveFingerprints(transport.check, call, timeout_s)

    def try_start(self) -> bool:
        """Start the data call if the fingerprints are there; True if this handle is done with them."""
        if self._inner is not None or self._error is not None:
            return True
        try:
            if not self._comparison.arrived():
                return False
            self._comparison.compare()
            left_s = max(self._deadline - time.monotonic(), 0.001)
            call, (source, target) = self._call, self._tensors
            if isinstance(self._comparison, AnyMessageFingerprints):
                call, source = self._comparison.settled(source), None
            self._inner = self._transport.data.start(call, source, target, left_s, True)
        except Exception as error:  # noqa: BLE001  # the one who waits raises it
            self._error = error
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        until = self._deadline if timeout_s is None else min(self._deadline, time.monotonic() + timeout_s)
        while not self.is_completed() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if self._error is not None:
            raise self._error
        if self._inner is None:
            self._comparison.give_up()
            return
        self._inner.wait(max(until - time.monotonic(), 0.001))

    def is_completed(self) -> bool:
        # All of them: a peer may wait for a call that this rank made on another communicator.
        for transport in list(_living):
            transport.advance()
        return self._error is not None or (self._inner is not None and self._inner.is_completed())
