"""A transport that compares what ranks are about to do before they do it.

On a backend that cannot see a disagreement, another size kills the process and another
dtype gives rubbish. So every call first exchanges a fingerprint of fixed size on a
transport of its own, and the data call starts only when the fingerprints fit. Nothing
blocks in ``start``: a program that is correct without these checks is correct with
them, only slower. For debugging (``BAGUA_DEBUG=1``).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator

import torch
from torch.distributed import PrefixStore

from bagua.comm.call import (
    DTYPE_NUMBERS,
    DTYPES,
    KIND_NUMBERS,
    KINDS,
    POINT_TO_POINT,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    Call,
)
from bagua.comm.transports.base import Handle, Membership, Transport
from bagua.errors import CollectiveMismatchError, CommunicationError

__all__ = ["CheckedTransport", "check_membership"]

_FACTS = 6
_SENDS, _RECEIVES = KIND_NUMBERS["send"], KIND_NUMBERS["recv"]
_POLL_S = 0.0002
_FAREWELL_S = 1.0

_ADVICE = "Make all ranks issue the same calls in the same order; the calls before this one are listed below."


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
        self.messages = _Messages(check)
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
        self.ways = [way[:2] for way in _roles(call)] if call.kind in POINT_TO_POINT else []
        self._comparison: _Table | _Letters
        if call.kind in POINT_TO_POINT:
            self._comparison = _Letters(transport.messages, call, timeout_s)
        else:
            self._comparison = _Table(transport.check, call, timeout_s)

    def try_start(self) -> bool:
        """Start the data call if the fingerprints are there; True if this handle is done with them."""
        if self._inner is not None or self._error is not None:
            return True
        try:
            if not self._comparison.arrived():
                return False
            self._comparison.compare()
            left_s = max(self._deadline - time.monotonic(), 0.001)
            self._inner = self._transport.data.start(self._call, *self._tensors, left_s, True)
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


# Fingerprints.


def _fingerprint(call: Call, size: int, kind: int) -> torch.Tensor:
    """``call`` in ``_FACTS + 2 * size`` whole numbers; the counts only where they matter."""
    reduction = REDUCTION_NUMBERS[call.reduction]
    facts = [kind, call.sequence, DTYPE_NUMBERS[call.dtype], call.numel, reduction, call.root]
    counts = [0] * (2 * size)
    if call.kind == "alltoall_v":
        facts[3] = 0
        counts = [*call.send_counts, *call.recv_counts]
    return torch.tensor(facts + counts, dtype=torch.int64)


def _describe(row: list[int], size: int) -> str:
    """The call behind a fingerprint, for people."""
    kind, sequence, dtype, numel, reduction, root = row[:_FACTS]
    counts = tuple(row[_FACTS : _FACTS + size]) if KINDS[kind] == "alltoall_v" else ()
    return str(Call(KINDS[kind], sequence, DTYPES[dtype], numel, REDUCTIONS[reduction], root, -1, counts))


class _Table:
    """The fingerprints of a collective: all ranks see all of them, so all raise together."""

    def __init__(self, check: Transport, call: Call, timeout_s: float) -> None:
        self._check = check
        self._rank = check.rank
        self._size = check.size
        self._ranks = check.membership.ranks
        own = _fingerprint(call, check.size, KIND_NUMBERS[call.kind])
        self._rows = torch.empty((check.size, own.numel()), dtype=torch.int64)
        gathering = Call("allgather", call.sequence, torch.int64, own.numel())
        self._handle = check.start(gathering, own, self._rows, timeout_s, True)

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
        for sender, receiver in self._pairs():
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

    def _pairs(self) -> Iterator[tuple[int, int]]:
        ranks = range(self._size)
        return ((sender, receiver) for sender in ranks for receiver in ranks)

    def give_up(self) -> None:
        """The deadline has passed: let the transport say who is missing."""
        self._handle.wait(0.001)


class _Messages:
    """Fingerprints of messages: who sends tells the receiver, and the other way round.

    Between two ranks the n-th fingerprint of a sender belongs to the n-th of the
    receiver, whatever order the two call in; so arrivals are sorted by role.
    """

    def __init__(self, check: Transport) -> None:
        self.check = check
        self._sequence = 0
        self._coming: dict[int, deque[tuple[Handle, torch.Tensor]]] = {}
        #: Handles of what was sent are kept until they are complete.
        self._going: list[Handle] = []
        self.sorted: dict[tuple[int, int], deque[list[int]]] = {}

    def post(self, peer: int, fingerprint: torch.Tensor, timeout_s: float) -> None:
        """Send a fingerprint to ``peer``, and expect one from there."""
        self._sequence += 1
        width = fingerprint.numel()
        answer = torch.empty_like(fingerprint)
        receiving = Call("recv", self._sequence, torch.int64, width, "", peer)
        sending = Call("send", self._sequence, torch.int64, width, "", peer)
        handle = self.check.start(receiving, None, answer, timeout_s, True)
        self._coming.setdefault(peer, deque()).append((handle, answer))
        self._going = [sent for sent in self._going if not sent.is_completed()]
        self._going.append(self.check.start(sending, fingerprint, None, timeout_s, True))

    def collect(self, peer: int) -> None:
        """Sort what has arrived from ``peer``."""
        coming = self._coming.get(peer, deque())
        while coming and coming[0][0].is_completed():
            handle, answer = coming.popleft()
            handle.wait()
            row = answer.tolist()
            self.sorted.setdefault((peer, row[0]), deque()).append(row)

    def flush(self) -> None:
        """Until the peers have what was sent: the error that follows closes the connections."""
        with contextlib.suppress(CommunicationError):
            for sent in self._going:
                sent.wait(_FAREWELL_S)

    def give_up(self, peer: int) -> None:
        """The deadline has passed: let the transport say so."""
        for handle, _ in self._coming.get(peer, ()):
            handle.wait(0.001)


class _Letters:
    """The one or two fingerprints of a message, and those that must fit."""

    def __init__(self, messages: _Messages, call: Call, timeout_s: float) -> None:
        self._messages = messages
        self._own: list[tuple[int, list[int]]] = []
        self._theirs: list[list[int]] = []
        size = messages.check.size
        for peer, role, numel in _roles(call):
            fingerprint = _fingerprint(call._replace(numel=numel, root=peer), size, role)
            self._own.append((peer, fingerprint.tolist()))
            messages.post(peer, fingerprint, timeout_s)

    def arrived(self) -> bool:
        for peer, own in self._own[len(self._theirs) :]:
            self._messages.collect(peer)
            opposite = _RECEIVES if own[0] == _SENDS else _SENDS
            waiting = self._messages.sorted.get((peer, opposite))
            if not waiting:
                return False
            self._theirs.append(waiting.popleft())
        return True

    def compare(self) -> None:
        """Raise if the other side moves something else."""
        size = self._messages.check.size
        for (peer, own), theirs in zip(self._own, self._theirs, strict=True):
            # dtype and number of elements.
            if own[2:4] != theirs[2:4]:
                name = self._messages.check.membership.ranks[peer]
                seen = f"rank {name}: {_describe(theirs, size)}"
                self._messages.flush()
                raise _mismatch("sender and receiver disagree", _describe(own, size), seen, [name])

    def give_up(self) -> None:
        """The deadline has passed."""
        for peer, _ in self._own[len(self._theirs) :]:
            self._messages.give_up(peer)


def _roles(call: Call) -> list[tuple[int, int, int]]:
    """Peer, role and number of elements of each half of a message."""
    if call.kind == "send":
        return [(call.root, _SENDS, call.numel)]
    if call.kind == "recv":
        return [(call.root, _RECEIVES, call.numel)]
    return [(call.root, _SENDS, call.numel), (call.source, _RECEIVES, call.recv_counts[0])]


def _mismatch(problem: str, own: str, other: str, peers: list[int]) -> CollectiveMismatchError:
    return CollectiveMismatchError(problem, expected=own, seen=other, peers=peers, advice=_ADVICE)
