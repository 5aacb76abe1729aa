"""The collectives of ranks that see each other's memory: who reads what, in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove

import torch
from torch.autograd.graph import increment_version

from bagua.comm.call import Call
from bagua.comm.reduction import fold
from bagua.comm.transports.memory.line import Deadline, Line, Notice, rows
from bagua.comm.transports.memory.peers import Peers
from bagua.errors import CollectiveMismatchError

#: Small for any number of ranks.
SMALL_BYTES = 64 * 1024


def small_bytes(size: int) -> int:
    """Up to here a private copy and a redundant reduction cost less than a second barrier.

    Every rank reduces the data of all, so that two ranks can afford more.
    """
    return 4 * SMALL_BYTES if size == 2 else SMALL_BYTES


def reads_all(call: Call, size: int) -> bool:
    """Whether each rank reduces all of an allreduce, if no rank lent its tensor.

    Two ranks move as many bytes in that way as with a half for each, and need one barrier less for a piece.
    """
    return size == 2 or call.nbytes <= small_bytes(size)


def slice_length(piece: int, size: int) -> int:
    """How many elements of a piece of ``piece`` elements each rank reduces; the last one may have fewer."""
    return -(-piece // size)


def own_slice(start: int, stop: int, length: int, rank: int) -> tuple[int, int]:
    """Bounds of what ``rank`` reduces of the piece of elements ``start`` to ``stop``.

    The slice of a rank begins equally far behind the start of each piece, also of the last one, which may be
    shorter: when a piece is shown, nothing comes where others may still read results.

    Example:
        >>> own_slice(10, 15, slice_length(5, 2), 1)
        (13, 15)
        >>> own_slice(15, 17, slice_length(5, 2), 1)
        (17, 17)
    """
    return min(start + rank * length, stop), min(start + (rank + 1) * length, stop)


def compare(ranks: Sequence[int], rank: int, notices: list[Notice]) -> None:
    """Raise ``CollectiveMismatchError`` unless all ranks published the same collective.

    Every rank compares the same notices, hence all raise or none.

    Args:
        ranks: global rank of each member, for the error.
        rank: number of this process in the communicator.
        notices: notice of each member.
    """
    mine = notices[rank].agreement
    for notice in notices:  # In each call: a comprehension takes twice as long.
        if notice.agreement is not mine and notice.agreement != mine:
            break
    else:
        if mine[0] == "alltoall_v":
            _compare_counts(ranks, rank, notices)
        return
    others = [other for other, notice in enumerate(notices) if notice.agreement != mine]
    first = notices[others[0]].call
    raise CollectiveMismatchError(
        "ranks disagree on what they are doing",
        peers=[ranks[other] for other in others],
        expected=f"{notices[rank].call} on rank {ranks[rank]}",
        seen=f"{first} on rank {ranks[others[0]]}",
        advice="All ranks must make the same calls, in the same order, with the same dtype and size.",
    )


def _compare_counts(ranks: Sequence[int], rank: int, notices: list[Notice]) -> None:
    size = len(notices)
    for source in range(size):
        for target in range(size):
            sent = notices[source].call.send_counts[target]
            received = notices[target].call.recv_counts[source]
            if sent != received:
                raise CollectiveMismatchError(
                    f"rank {ranks[source]} sends {sent} elements to rank {ranks[target]}, which expects {received}",
                    peers=(ranks[source], ranks[target]),
                    expected=f"{notices[rank].call} receiving {list(notices[rank].call.recv_counts)}",
                    seen=f"{sent} sent, {received} expected",
                    advice="input_counts[j] of rank i must equal output_counts[i] of rank j.",
                )


class MemoryExchange:
    """One collective, from the moment that all ranks have agreed on it.

    It goes through the columns of the share piece by piece: as many as every rank can
    show at once, which is all of them for most memory.

    Args:
        peers: the ranks.
        slot: number of the slot in which they published.
        call: call on which they agreed.
        target: tensor that this rank writes.
        notices: notice of each rank.
        deadline: moment at which the call must be over.
        spin_s: seconds of busy waiting at each barrier.
    """

    __slots__ = (
        "_address", "_call", "_deadline", "_itemsize", "_notices", "_peers", "_slot", "_spin_s", "_target", "_unseen",
    )  # fmt: skip

    def __init__(
        self,
        peers: Peers,
        slot: int,
        call: Call,
        target: torch.Tensor | None,
        notices: list[Notice],
        deadline: Deadline,
        spin_s: float,
    ) -> None:
        self._peers = peers
        self._spin_s = spin_s
        self._slot = slot
        self._call = call
        self._target = target if target is None or target.dim() == 1 else target.view(-1)
        self._address = 0 if target is None else target.data_ptr()
        self._itemsize = call.dtype.itemsize
        self._notices = notices
        self._deadline = deadline
        #: Whether the target was written in ways that autograd does not see.
        self._unseen = False

    def run(self) -> None:
        """Move the data, and return when no peer reads this rank's tensors any more."""
        peers, call = self._peers, self._call
        piece, lent = self._notices[0].piece, False
        for _, _, is_lent, shown in self._notices:
            lent = lent or is_lent
            if shown < piece:  # noqa: PLR1730 - a builtin takes twice as long, in each call
                piece = shown
        if call.kind == "allreduce":
            if lent or not reads_all(call, peers.size):
                self._reduce_slices(piece)
            else:
                self._reduce_all(piece)
        else:
            width = call.numel
            if call.kind == "alltoall_v":
                width = max(max(notice.call.send_counts) for notice in self._notices)
            self._move(getattr(self, f"_{call.kind}"), piece, width)
        if lent:
            peers.pass_barrier(call, peers.arrive(call), self._deadline, self._spin_s)
            peers.withdraw(self._slot)
        peers.conclude(self._slot)
        if self._unseen and self._target is not None and not self._target.is_inference():
            increment_version(self._target)  # so that autograd notices, as after ``copy_``

    def _move(self, move: Callable[[int, int], None], piece: int, width: int) -> None:
        """Do ``move`` for all columns: for one piece while peers may still do it for the one before."""
        if width <= piece:
            move(0, width)
            return
        peers, call = self._peers, self._call
        for start in range(0, width, piece):
            stop = min(start + piece, width)
            if start:
                peers.stage(self._slot, start, stop)
                peers.pass_barrier(call, peers.arrive(call), self._deadline, self._spin_s)
            move(start, stop)

    # An allreduce, whose source is its target.

    def _reduce_all(self, piece: int) -> None:
        """Every rank reduces everything.

        Two areas are enough: a rank that shows a piece has passed the barrier to which the others came when they had
        reduced the piece that lay there before.
        """
        peers, call, slot, target = self._peers, self._call, self._slot, self._target
        assert target is not None
        self._unseen = call.numel > piece  # Autograd does not know tensors that are split in this way.
        start = 0
        for out in (target,) if call.numel <= piece else torch.unsafe_split(target, piece):
            stop = start + out.numel()
            if start:
                peers.stage(slot, start, stop)
                peers.pass_barrier(call, peers.arrive(call), self._deadline, self._spin_s)
            parts = [out] * peers.size
            for rank, line in enumerate(peers.lines):
                if rank != peers.rank:
                    parts[rank] = line.view(slot, start, stop)
            fold(parts, call.reduction, out)
            start = stop

    def _reduce_slices(self, piece: int) -> None:
        """One barrier for each piece: this one is reduced, and the next can be seen.

        Two areas are enough: the next piece goes where the one before this lay. All have reduced that; who still
        copies its results reads the own slice, which stays as it is until all have come to the next barrier.
        """
        peers, call, slot = self._peers, self._call, self._slot
        rank, numel, piece = peers.rank, call.numel, min(piece, call.numel)
        length = slice_length(piece, peers.size)
        for start in range(0, numel, piece):
            stop = min(start + piece, numel)
            first, last = own_slice(start, stop, length, rank)
            if first < last:
                # Where it lies published: no other rank reads that slice before the barrier.
                fold(self._parts(first, last), call.reduction, peers.own.view(slot, first, last))
            if stop < numel:
                end = min(stop + piece, numel)
                peers.stage(slot, stop, end, own_slice(stop, end, length, rank))
            number = peers.arrive(call)
            self._pull(peers.own, first, last)
            peers.pass_barrier(call, number, self._deadline, self._spin_s)
            first = start
            for line in peers.lines:
                last = min(first + length, stop)
                if line is not peers.own:
                    self._pull(line, first, last)
                first = last

    def _pull(self, line: Line, start: int, stop: int) -> None:
        """Copy what the rank of ``line`` has reduced, unless it is there already."""
        if start < stop:
            theirs = line.address(self._slot, start, stop)
            ours = self._address + start * self._itemsize
            if theirs != ours:
                memmove(ours, theirs, (stop - start) * self._itemsize)
                self._unseen = True

    # One method per kind: columns ``start`` to ``stop``.

    def _parts(self, start: int, stop: int) -> list[torch.Tensor]:
        """What each rank has there; the own part where the caller has it."""
        own, slot = self._peers.own, self._slot
        return [
            line.source(slot, start, stop) if line is own else line.view(slot, start, stop)
            for line in self._peers.lines
        ]

    def _fold(self, start: int, stop: int, row: int = 0) -> None:
        """Reduce that part of row ``row`` of all ranks into the same part of the target."""
        target, skipped = self._target, row * self._call.numel
        assert target is not None
        out = target if stop - start == target.numel() else target[start:stop]
        fold(self._parts(skipped + start, skipped + stop), self._call.reduction, out)

    def _copy(self, rank: int, first: int, start: int, stop: int) -> None:
        """Copy elements ``start`` to ``stop`` of the source of ``rank`` to ``first`` in the target."""
        line, slot = self._peers.lines[rank], self._slot
        own = line is self._peers.own
        address = line.source_address(slot, start, stop) if own else line.address(slot, start, stop)
        memmove(self._address + first * self._itemsize, address, (stop - start) * self._itemsize)
        self._unseen = True

    def _reduce(self, start: int, stop: int) -> None:
        if self._peers.rank == self._call.root:
            self._fold(start, stop)

    def _broadcast(self, start: int, stop: int) -> None:
        if self._peers.rank != self._call.root:
            self._copy(self._call.root, start, start, stop)

    def _allgather(self, start: int, stop: int) -> None:
        for rank in range(self._peers.size):
            self._copy(rank, rank * self._call.numel + start, start, stop)

    def _gather(self, start: int, stop: int) -> None:
        if self._peers.rank == self._call.root:
            self._allgather(start, stop)

    def _scatter(self, start: int, stop: int) -> None:
        row = self._peers.rank * self._call.numel
        self._copy(self._call.root, start, row + start, row + stop)

    def _reduce_scatter(self, start: int, stop: int) -> None:
        self._fold(start, stop, self._peers.rank)

    def _alltoall(self, start: int, stop: int) -> None:
        row = self._peers.rank * self._call.numel
        for rank in range(self._peers.size):
            self._copy(rank, rank * self._call.numel + start, row + start, row + stop)

    def _alltoall_v(self, start: int, stop: int) -> None:
        place = 0
        for rank, notice in enumerate(self._notices):
            row, length = rows(notice.call, self._peers.size)[self._peers.rank]
            end = min(stop, length)
            if start < end:
                self._copy(rank, place + start, row + start, row + end)
            place += length
