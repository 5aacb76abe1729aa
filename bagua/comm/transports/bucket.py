"""The transport of members that reach no other than a bucket: collectives made of objects that are put and got.

* Each member puts its part of a call as one object, which never changes, and gets what it needs of the others'. So a
  member that dies after its put has given its part, and one that is late finds all that it missed.
* Up to three members, each gets everything from the others, and folds it in the order of ranks. From four on, a large
  allreduce has an owner for each slice: a member transfers about twice its tensor, however many there are.
* The name of an object holds a digest of what its owner called: who calls something else is found when others wait.
* A member deletes what it has put before a call in which all wait for all, once it has got all of that call: then
  no rank reads the older objects any more.
"""

from __future__ import annotations

import ctypes
import json
import threading
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch.distributed import DistNetworkError

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.lifetime.background import bounded
from bagua.comm.reduction import fold
from bagua.comm.store.bucket import bucket_of
from bagua.comm.transports.contract import DONE, Data, Handle, Membership
from bagua.comm.transports.memory.lanes import COLLECTIVE, Lanes, LanesTransport
from bagua.comm.transports.memory.line import Deadline
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    CommunicatorClosedError,
    TransportUnavailableError,
    relayed,
)

T = TypeVar("T")

#: Bytes of an object that are got at once: what is in memory beside the tensors, for each of the others.
PIECE_BYTES = 16 * 1024 * 1024
#: Up to so many members, or bytes, everyone gets everything: then a call is one put and one wait.
_FEW, _SMALL_BYTES = 3, 256 * 1024
#: Calls in which all wait for all.
_TOGETHER = frozenset({"allreduce", "allgather", "reduce_scatter", "alltoall", "barrier"})
#: Hexadecimal digits of the digest of a call.
_MARK = 8
#: Looks for an object after which the reason is looked for why it is not there.
_PATIENCE = 4
#: Names, or bytes, of own objects that are kept before they are deleted in one request.
_MOST_NAMES, _MOST_BYTES = 32, 1024 * 1024
#: Seconds that telling the others may take when a call fails.
_FAREWELL_S = 2.0


class BucketTransport(LanesTransport):
    """Collectives over the bucket that keeps the store of the members.

    Args:
        membership: the ranks served; its store is a part of a ``BucketStore``.

    Raises:
        TransportUnavailableError: the store is another one.
    """

    name = "bucket"
    compares_calls = True
    overlaps = True

    def __init__(self, membership: Membership) -> None:
        super().__init__(membership)
        bucket = bucket_of(membership.store)
        self._own = membership.ranks[self.rank]
        if bucket is None:
            raise TransportUnavailableError(
                "the backend bucket needs a store in a bucket",
                rank=self._own,
                advice="It is chosen by join_islands, for an address that begins with file://, s3://, gs:// or az://.",
            )
        self._bucket = bucket
        self._home = f"objects/{membership.store.compare_set('objects', '', uuid.uuid4().hex).decode()}"
        self._lanes = Lanes("bagua-bucket")
        self._ended = threading.Event()
        #: Who ended it and why, once it is over.
        self._end: tuple[int, str] = (self._own, "it closed its communicator")
        #: Own objects that others may still read, and their bytes.
        self._put: dict[str, int] = {}
        #: Those of communicators before: all members that are here have left these.
        self._older, bucket.leftovers = bucket.leftovers, []

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        """See ``Transport.start``; calls run in their order."""
        if call.kind in POINT_TO_POINT:
            raise TransportUnavailableError(f"over a bucket, ranks cannot {call.kind}", rank=self._own)
        if call.numel == 0 and call.kind not in ("barrier", "alltoall_v"):
            return DONE
        deadline = Deadline.after(timeout_s)
        task = partial(self._run, call, source, target, deadline)
        return self._lanes.start(COLLECTIVE, task, deadline, self.abort, asynchronous=asynchronous)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """End the calls here, and leave word for those who wait."""
        if self._ended.is_set():
            return
        self._end = (self._own if culprit is None else culprit, reason)
        self._ended.set()
        self._older.append(f"{self._home}/end")
        word = json.dumps([self._own, *self._end]).encode()
        bounded(partial(self._bucket.create, f"{self._home}/end", word), _FAREWELL_S)

    def close(self) -> None:
        """Let calls finish for a second. What others may still read stays, until the next communicator deletes it."""
        self._stop_lanes()
        self._ended.set()
        self._bucket.leftovers += [*self._put, *self._older]
        self._put, self._older = {}, []

    # One call.

    def _run(self, call: Call, source: Data, target: Data, deadline: Deadline) -> None:
        before = list(self._put)
        _Exchange(self, call, deadline).run(
            None if source is None else source.reshape(-1), None if target is None else target.view(-1)
        )
        if call.kind in _TOGETHER:
            self._forget(before)

    def _forget(self, names: Sequence[str]) -> None:
        """Delete own objects that no member reads any more, when it pays."""
        if self._older or len(names) >= _MOST_NAMES or sum(self._put[name] for name in names) >= _MOST_BYTES:
            gone, self._older = [*self._older, *names], []
            bounded(partial(self._bucket.delete, gone), _FAREWELL_S)  # What is not deleted now is so by hand.
            for name in names:
                del self._put[name]

    def put(self, name: str, content: memoryview, deadline: Deadline) -> None:
        """Put an object of this rank."""
        path = f"{self._home}/{name}"
        self._put[path] = len(content)
        self._insist(partial(self._tell, path, content), deadline, self.rank, name)

    def _tell(self, path: str, content: memoryview) -> bool:
        self._bucket.put(path, content)
        return True

    def get(self, name: str, owner: int, start: int, length: int, deadline: Deadline) -> memoryview:
        """A part of an object of rank ``owner``, as soon as it is there."""
        path = f"{self._home}/{name}"
        return self._insist(partial(self._bucket.get_part, path, start, length), deadline, owner, name)

    def _insist(self, ask: Callable[[], T | None], deadline: Deadline, owner: int, name: str) -> T:
        """What ``ask`` returns when it returns something: a bucket may be out of reach for a while."""
        for look, pause_s in enumerate(self._bucket.pauses()):
            self._check(deadline, owner)
            trouble = None
            try:
                found = ask()
                if found is not None:
                    return found
                if look >= _PATIENCE and (end := self._look_for_trouble(owner, name)):
                    found = ask()  # Who has ended it may have put this before.
                    if found is not None:
                        return found
                    self._ended.set()
                    raise end
            except DistNetworkError as error:
                trouble = error
            self._ended.wait(max(min(pause_s, deadline.left_s), 0.0))
            if trouble is not None and deadline.left_s <= 0:
                raise CollectiveTimeoutError(str(trouble), rank=self._own, timeout_s=deadline.timeout_s) from None
        raise AssertionError

    def _check(self, deadline: Deadline, owner: int) -> None:
        if self._ended.is_set():
            culprit, reason = self._end
            if culprit == self._own:
                raise CommunicatorClosedError(f"this rank ended the communicator: {reason}", rank=self._own)
            raise relayed(culprit, reason, self._own)
        if deadline.left_s <= 0:
            late = self.membership.ranks[owner]
            raise CollectiveTimeoutError.of((late,), deadline.timeout_s, self._own)

    def _look_for_trouble(self, owner: int, name: str) -> CommunicationError | None:
        """The error if somebody has ended the communicator. Raises if ``owner`` has called something else."""
        end = self._bucket.get(f"{self._home}/end")
        if end is not None:
            teller, culprit, reason = json.loads(end)
            self._end = (culprit, reason)
            return relayed(culprit, reason, self._own, teller=teller)
        sequence, _, rest = name.partition("/")
        expected = rest[: len(f"{owner}-") + _MARK]
        others = [path.rpartition("/")[2] for path in self._bucket.list(f"{self._home}/{sequence}")]
        strange = [one for one in others if one.startswith(f"{owner}-") and not one.startswith(expected)]
        if strange:
            raise CollectiveMismatchError(
                f"rank {self.membership.ranks[owner]} calls something else as collective {sequence}",
                rank=self._own,
                peers=[self.membership.ranks[owner]],
                expected=expected,
                seen=strange[0],
            )
        return None


class _Exchange:
    """One call: what this rank puts, and what it gets."""

    def __init__(self, transport: BucketTransport, call: Call, deadline: Deadline) -> None:
        self._transport, self._call, self._deadline = transport, call, deadline
        self._rank, self._size = transport.rank, transport.size
        digest = zlib.crc32(repr(call.agreement()).encode())
        self._mark = f"{digest:0{_MARK}x}"

    def run(self, source: Data, target: Data) -> None:
        """Make the call; both tensors are flat."""
        if self._call.kind == "barrier":  # One byte of each rank for each rank.
            source = torch.zeros(1, dtype=torch.uint8, device="cpu")
            target = torch.empty(self._size, dtype=torch.uint8, device="cpu")
        getattr(self, f"_{self._call.kind}", self._copy)(source, target)

    def _copy(self, source: Data, target: Data) -> None:
        kind = self._call.kind
        if source is not None:
            self._put(source)
        if target is None:
            return
        start = self._rank * self._call.numel if kind in ("alltoall", "scatter") else 0
        if kind in ("broadcast", "scatter"):
            self._get(target, self._call.root, start, source)
            return
        for owner, part in enumerate(_cut(target, [target.numel() // self._size] * self._size)):
            self._get(part, owner, start, source)

    def _alltoall_v(self, source: torch.Tensor, target: torch.Tensor) -> None:
        sent = _cut(source, self._call.send_counts)
        for other, part in enumerate(sent):
            if other != self._rank and part.numel():
                self._put(part, f"-to{other}")
        for owner, part in enumerate(_cut(target, self._call.recv_counts)):
            if owner == self._rank:
                part.copy_(sent[owner])
            elif part.numel():
                self._get(part, owner, 0, None, f"-to{self._rank}")

    # Reductions. Every rank folds in the order of ranks, so all have the same bits.

    def _allreduce(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._put(source)
        if self._size <= _FEW or source.nbytes <= _SMALL_BYTES:
            self._fold(target, source, 0)
            return
        bounds = [target.numel() * rank // self._size for rank in range(self._size + 1)]
        start, stop = bounds[self._rank : self._rank + 2]
        own = target[start:stop]
        if own.numel():
            self._fold(own, source[start:stop], start)
            self._put(own, "-sum")
        for owner, (first, last) in enumerate(pairwise(bounds)):
            if owner != self._rank and first < last:
                self._get(target[first:last], owner, 0, None, "-sum")

    def _reduce(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._rank == self._call.root:
            self._fold(target, source, 0)
        else:
            self._put(source)

    def _reduce_scatter(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._put(source)
        start = self._rank * self._call.numel
        self._fold(target, source[start : start + self._call.numel], start)

    def _fold(self, target: torch.Tensor, own: torch.Tensor, start: int) -> None:
        """Reduce what all have from element ``start`` on into ``target``; ``own`` is this rank's share of it."""
        count = max(PIECE_BYTES // target.element_size(), 1)
        others = [owner for owner in range(self._size) if owner != self._rank]
        scratch = {owner: target.new_empty(min(count, target.numel())) for owner in others}
        for first in range(0, target.numel(), count):
            piece = target[first : first + count]
            parts = {self._rank: own[first : first + count]}
            for owner in others:
                parts[owner] = scratch[owner][: piece.numel()]
                self._get(parts[owner], owner, start + first, None)
            fold([parts[owner] for owner in range(self._size)], self._call.reduction, piece)

    # Objects.

    def _name(self, owner: int, part: str) -> str:
        return f"{self._call.sequence}/{owner}-{self._mark}{part}"

    def _put(self, tensor: torch.Tensor, part: str = "") -> None:
        self._transport.put(self._name(self._rank, part), _bytes_of(tensor.contiguous()), self._deadline)

    def _get(self, into: torch.Tensor, owner: int, start: int, own: Data, part: str = "") -> None:
        """Bring elements of what ``owner`` has put, from ``start`` on, ``into`` a flat tensor."""
        if owner == self._rank and own is not None:
            into.copy_(own[start : start + into.numel()])
            return
        name, room = self._name(owner, part), _bytes_of(into)
        begin = start * into.element_size()
        for first in range(0, len(room), PIECE_BYTES):
            last = min(first + PIECE_BYTES, len(room))
            found = self._transport.get(name, owner, begin + first, last - first, self._deadline)
            if len(found) != last - first:  # Not written by a member: these are as long as the call, or not there.
                raise CollectiveMismatchError(
                    f"the object {name} in the bucket is cut off",
                    peers=[self._transport.membership.ranks[owner]],
                    expected=f"{last - first} bytes from {begin + first} on",
                    seen=f"{len(found)} bytes",
                    advice="Look at who else writes to the bucket.",
                )
            room[first:last] = found
        if not into.is_inference():
            torch.autograd.graph.increment_version(into)  # so that autograd notices, as after ``copy_``


def _cut(flat: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Parts of so many elements."""
    return [flat[start:stop] for start, stop in pairwise(accumulate(counts, initial=0))]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which must live as long. Not by NumPy, which may not be there."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(memory).cast("B")
