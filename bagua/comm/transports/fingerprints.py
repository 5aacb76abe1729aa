"""What ranks are about to do, in a few numbers, and how these are compared; see ``checked.py``."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

from bagua.comm.call import (
    DTYPE_NUMBERS,
    DTYPES,
    KIND_NUMBERS,
    KINDS,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    Call,
)
from bagua.comm.transports.base import Handle, Transport
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicationError

__all__ = [
    "AnyMessageFingerprints",
    "CollectiveFingerprints",
    "FingerprintExchange",
    "MessageFingerprints",
    "fingerprint_of",
    "ways_of",
]

_FACTS = 6
_SENDS, _RECEIVES = KIND_NUMBERS["send"], KIND_NUMBERS["recv"]
_FAREWELL_S = 1.0
#: A fingerprint that is expected before anybody sent one has no deadline.
_LONGEST_S = 365 * 24 * 3600.0

_ADVICE = "Make all ranks issue the same calls in the same order; the calls before this one are listed below."


def fingerprint_of(call: Call, size: int, kind: int) -> torch.Tensor:
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


class CollectiveFingerprints:
    """The fingerprints of a collective: all ranks see all of them, so all raise together."""

    def __init__(self, check: Transport, call: Call, timeout_s: float) -> None:
        self._check = check
        self._rank = check.rank
        self._size = check.size
        self._ranks = check.membership.ranks
        own = fingerprint_of(call, check.size, KIND_NUMBERS[call.kind])
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


class FingerprintExchange:
    """Fingerprints of messages: who sends tells the receiver, and the other way round.

    Between two ranks the n-th fingerprint of a sender belongs to the n-th of the
    receiver, whatever order the two call in; so arrivals are sorted by role.
    """

    def __init__(self, check: Transport) -> None:
        self.check = check
        self._sequence = 0
        self._coming: dict[int, deque[tuple[Handle, torch.Tensor]]] = {}
        #: Peers whose next fingerprint is expected already, by a receive from any rank.
        self._expected: set[int] = set()
        #: Handles of what was sent are kept until they are complete.
        self._going: list[Handle] = []
        self.sorted: dict[tuple[int, int], deque[list[int]]] = {}

    def post(self, peer: int, fingerprint: torch.Tensor, timeout_s: float) -> None:
        """Send a fingerprint to ``peer``, and expect one from there."""
        if peer in self._expected:
            self._expected.remove(peer)
        else:
            self._receive(peer, fingerprint, timeout_s)
        sending = Call("send", self._sequence, torch.int64, fingerprint.numel(), "", peer)
        self._going = [sent for sent in self._going if not sent.is_completed()]
        self._going.append(self.check.start(sending, fingerprint, None, timeout_s, True))

    def expect(self, like: torch.Tensor) -> None:
        """Expect a fingerprint from every peer, before this rank knows with which of them it will have to do."""
        for peer in range(self.check.size):
            if peer != self.check.rank and peer not in self._expected:
                self._expected.add(peer)
                self._receive(peer, like, _LONGEST_S)

    def _receive(self, peer: int, like: torch.Tensor, timeout_s: float) -> None:
        self._sequence += 1
        answer = torch.empty_like(like)
        receiving = Call("recv", self._sequence, torch.int64, like.numel(), "", peer)
        handle = self.check.start(receiving, None, answer, timeout_s, True)
        self._coming.setdefault(peer, deque()).append((handle, answer))

    def offered(self) -> int | None:
        """A rank whose next message has yet to be received; None if no rank has one."""
        for peer in range(self.check.size):
            self.collect(peer)
            if self.sorted.get((peer, _SENDS)):
                return peer
        return None

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


class MessageFingerprints:
    """The one or two fingerprints of a message, and those that must fit."""

    def __init__(self, messages: FingerprintExchange, call: Call, timeout_s: float) -> None:
        self._messages = messages
        self._own: list[tuple[int, list[int]]] = []
        self._theirs: list[list[int]] = []
        size = messages.check.size
        for peer, role, numel in _roles(call):
            fingerprint = fingerprint_of(call._replace(numel=numel, root=peer), size, role)
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


class AnyMessageFingerprints:
    """The fingerprint of a receive from any rank: it is one of a receive from the rank that is the first to send."""

    def __init__(self, messages: FingerprintExchange, call: Call, timeout_s: float) -> None:
        self._messages = messages
        self._call = call
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._letters: MessageFingerprints | None = None
        messages.expect(fingerprint_of(call, messages.check.size, _RECEIVES))

    def arrived(self) -> bool:
        if self._letters is None:
            peer = self._messages.offered()
            if peer is None:
                return False
            self._call = self._call._replace(root=peer)
            self._letters = MessageFingerprints(
                self._messages, self._call, max(self._deadline - time.monotonic(), 0.001)
            )
        return self._letters.arrived()

    def compare(self) -> None:
        """Raise if the other side moves something else."""
        assert self._letters is not None
        self._letters.compare()

    def settled(self, sender: torch.Tensor | None) -> Call:
        """The receive from the rank that was found, which ``sender`` takes."""
        assert sender is not None
        sender.fill_(self._call.root)
        return self._call

    def give_up(self) -> None:
        """The deadline has passed."""
        raise CollectiveTimeoutError("no rank has sent a message", timeout_s=self._timeout_s)


def ways_of(call: Call, rank: int, size: int) -> list[tuple[int, int]]:
    """Peer and direction of a message, or of its two halves; of a receive from any rank, all that it may take."""
    if call.kind == "recv" and call.root < 0:
        return [(peer, _RECEIVES) for peer in range(size) if peer != rank]
    return [way[:2] for way in _roles(call)]


def _roles(call: Call) -> list[tuple[int, int, int]]:
    """Peer, role and number of elements of each half of a message."""
    if call.kind == "send":
        return [(call.root, _SENDS, call.numel)]
    if call.kind == "recv":
        return [(call.root, _RECEIVES, call.numel)]
    return [(call.root, _SENDS, call.numel), (call.source, _RECEIVES, call.recv_counts[0])]


def _mismatch(problem: str, own: str, other: str, peers: list[int]) -> CollectiveMismatchError:
    return CollectiveMismatchError(problem, expected=own, seen=other, peers=peers, advice=_ADVICE)
