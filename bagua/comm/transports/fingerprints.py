"""What ranks are about to do, in a few numbers, and how these are compared; see ``checked.py``."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator

import torch
from torch.distributed import PrefixStore

from bagua.comm.call import (
    DTYPE_NUMBERS,
    DTYPES,
    KIND_NUMBERS,
    KINDS,
    REDUCTION_NUMBERS,
    REDUCTIONS,
    Call,
)
from bagua.comm.transports.base import DONE, Handle, Transport
from bagua.errors import CollectiveMismatchError, CommunicationError

_FACTS = 6
_SENDS, _RECEIVES = KIND_NUMBERS["send"], KIND_NUMBERS["recv"]
_FAREWELL_S = 1.0

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
        self._timeout_s = timeout_s
        self._own = fingerprint_of(call, check.size, KIND_NUMBERS[call.kind])
        self._rows = torch.empty((check.size, self._own.numel()), dtype=torch.int64)
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
    receiver, whatever order the two call in; so arrivals are sorted by role. One is
    expected from a rank only while a call waits for it: what is left at the end would
    look like a call under way.
    """

    def __init__(self, check: Transport) -> None:
        self.check = check
        self._sequence = 0
        self._coming: dict[int, tuple[Handle, torch.Tensor]] = {}
        self._arrived: dict[tuple[int, int], deque[list[int]]] = {}
        #: Handles of what was sent are kept until they are complete.
        self._going: list[Handle] = []
        #: How many messages each rank has begun to send to each other, for those who receive from any rank.
        self._board = PrefixStore("sent", check.membership.store)
        self._received: Counter[int] = Counter()

    def tell(self, peer: int, fingerprint: torch.Tensor, timeout_s: float) -> None:
        """Send ``fingerprint`` to ``peer``."""
        sending = Call("send", self._next(), torch.int64, fingerprint.numel(), "", peer)
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
            receiving = Call("recv", self._next(), torch.int64, like.numel(), "", peer)
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

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

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

    def __init__(self, messages: FingerprintExchange, call: Call, timeout_s: float) -> None:
        self._messages = messages
        self._peer = call.root
        self._role = KIND_NUMBERS[call.kind]
        self._until = time.monotonic() + timeout_s
        self._own = fingerprint_of(call, messages.check.size, self._role)
        self._theirs: list[int] | None = None
        self._told = False

    def tell(self) -> None:
        """Tell the other rank, once."""
        if not self._told:
            self._told = True
            self._messages.tell(self._peer, self._own, self._left_s())

    def arrived(self) -> bool:
        """Whether the other rank has told what it does. It is asked for until it has."""
        if self._theirs is None:
            opposite = _RECEIVES if self._role == _SENDS else _SENDS
            self._theirs = self._messages.take(self._peer, opposite, self._own, self._left_s())
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

    def _left_s(self) -> float:
        return max(self._until - time.monotonic(), 0.001)


def _mismatch(problem: str, own: str, other: str, peers: list[int]) -> CollectiveMismatchError:
    return CollectiveMismatchError(problem, expected=own, seen=other, peers=peers, advice=_ADVICE)
