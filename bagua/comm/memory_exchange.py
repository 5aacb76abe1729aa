"""The collectives of ranks that see each other's memory: who reads what, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from bagua.comm.call import Call
from bagua.comm.copying import copy_flat
from bagua.comm.memory_line import Deadline, Notice, rows
from bagua.comm.memory_peers import Peers
from bagua.comm.reduction import fold
from bagua.errors import CollectiveMismatchError

__all__ = ["SMALL_BYTES", "Exchange", "compare", "slices", "small_bytes"]

#: Small for any number of ranks.
SMALL_BYTES = 64 * 1024


def small_bytes(size: int) -> int:
    """Up to here a private copy and a redundant reduction cost less than a second barrier.

    Every rank reduces the data of all, so that two ranks can afford more.
    """
    return 4 * SMALL_BYTES if size == 2 else SMALL_BYTES


def slices(start: int, stop: int, size: int) -> list[int]:
    """Bounds of the part that each rank reduces of elements ``start`` to ``stop``.

    Example:
        >>> slices(10, 15, 2)
        [10, 12, 15]
    """
    return [start + (stop - start) * rank // size for rank in range(size + 1)]


def compare(rank: int, notices: list[Notice]) -> None:
    """Raise ``CollectiveMismatchError`` unless all ranks published the same collective.

    Every rank compares the same notices, hence all raise or none.
    """
    mine = notices[rank].agreement
    others = [
        other for other, notice in enumerate(notices) if notice.agreement is not mine and notice.agreement != mine
    ]
    if others:
        first = notices[others[0]].call
        raise CollectiveMismatchError(
            "ranks disagree on what they are doing",
            rank=rank,
            peers=others,
            expected=f"{notices[rank].call} on rank {rank}",
            seen=f"{first} on rank {others[0]}",
            advice="All ranks must make the same calls, in the same order, with the same dtype and size.",
        )
    if mine[0] == "alltoall_v":
        _compare_counts(rank, notices)


def _compare_counts(rank: int, notices: list[Notice]) -> None:
    size = len(notices)
    for source in range(size):
        for target in range(size):
            sent = notices[source].call.send_counts[target]
            received = notices[target].call.recv_counts[source]
            if sent != received:
                raise CollectiveMismatchError(
                    f"rank {source} sends {sent} elements to rank {target}, which expects {received}",
                    rank=rank,
                    peers=(source, target),
                    expected=f"{notices[rank].call} receiving {list(notices[rank].call.recv_counts)}",
                    seen=f"{sent} sent, {received} expected",
                    advice="input_counts[j] of rank i must equal output_counts[i] of rank j.",
                )


class Exchange:
    """One collective, from the moment that all ranks have agreed on it.

    It goes through the columns of the share piece by piece: as many as every rank can
    show at once, which is all of them for most memory.

    Args:
        peers: the ranks.
        slot: where they published.
        call: what they agreed on.
        target: what this rank writes.
        notices: what each rank published.
        deadline: of the call.
        inline: whether the calling thread runs it, which has nothing else to do.
    """

    __slots__ = ("_call", "_deadline", "_notices", "_peers", "_slot", "_spin_s", "_target")

    def __init__(
        self,
        peers: Peers,
        slot: int,
        call: Call,
        target: torch.Tensor | None,
        notices: list[Notice],
        deadline: Deadline,
        inline: bool,
    ) -> None:
        self._peers = peers
        self._spin_s = peers.spin_inside_s if inline else peers.spin_s
        self._slot = slot
        self._call = call
        self._target = target if target is None or target.dim() == 1 else target.view(-1)
        self._notices = notices
        self._deadline = deadline

    def run(self) -> None:
        """Move the data, and return when nobody reads this rank's tensors any more."""
        move = self._MOVES[self._call.kind]
        width = self._width()
        piece = max(min([notice.piece for notice in self._notices]), 1)
        for start in range(0, max(width, 1), piece):
            stop = min(start + piece, width)
            if start:
                self._peers.stage(self._slot, start, stop)
                self._barrier()
            move(self, start, stop)
        if True in [notice.lent for notice in self._notices]:
            self._barrier()
            self._peers.withdraw(self._slot)
        self._peers.conclude(self._slot)

    def _width(self) -> int:
        if self._call.kind != "alltoall_v":
            return self._call.numel
        return max(max(notice.call.send_counts) for notice in self._notices)

    def _barrier(self) -> None:
        self._peers.barrier(self._call, self._deadline, spin_s=self._spin_s)

    def _view(self, rank: int, start: int, stop: int) -> torch.Tensor:
        line = self._peers.lines[rank]
        return (line.view if rank != self._peers.rank else line.source)(self._slot, start, stop)

    def _out(self, start: int, stop: int) -> torch.Tensor:
        target = self._target
        assert target is not None
        return target if start == 0 and stop == target.numel() else target[start:stop]

    # One method per kind: columns ``start`` to ``stop``.

    def _allreduce(self, start: int, stop: int) -> None:
        if self._call.nbytes <= small_bytes(self._peers.size):
            slot = self._slot
            parts = [line.view(slot, start, stop) for line in self._peers.lines]
            fold(parts, self._call.reduction, self._out(start, stop))
            return
        # Rank r reduces slice r of all ranks where its own lies published: nobody else
        # reads that slice before the barrier. Afterwards everyone pulls the slices.
        peers, slot = self._peers, self._slot
        bounds = slices(start, stop, peers.size)
        first, last = bounds[peers.rank], bounds[peers.rank + 1]
        parts = [self._view(rank, first, last) for rank in range(peers.size)]
        fold(parts, self._call.reduction, peers.own.view(slot, first, last))
        self._barrier()
        for rank, line in enumerate(peers.lines):
            theirs = line.view(slot, bounds[rank], bounds[rank + 1])
            ours = self._out(bounds[rank], bounds[rank + 1])
            if theirs.data_ptr() != ours.data_ptr():
                copy_flat(ours, theirs)

    def _reduce(self, start: int, stop: int) -> None:
        if self._peers.rank == self._call.root:
            parts = [self._view(rank, start, stop) for rank in range(self._peers.size)]
            fold(parts, self._call.reduction, self._out(start, stop))

    def _broadcast(self, start: int, stop: int) -> None:
        if self._peers.rank != self._call.root:
            copy_flat(self._out(start, stop), self._view(self._call.root, start, stop))

    def _allgather(self, start: int, stop: int) -> None:
        for rank in range(self._peers.size):
            place = rank * self._call.numel
            copy_flat(self._out(place + start, place + stop), self._view(rank, start, stop))

    def _gather(self, start: int, stop: int) -> None:
        if self._peers.rank == self._call.root:
            self._allgather(start, stop)

    def _scatter(self, start: int, stop: int) -> None:
        row = self._peers.rank * self._call.numel
        copy_flat(self._out(start, stop), self._view(self._call.root, row + start, row + stop))

    def _reduce_scatter(self, start: int, stop: int) -> None:
        row = self._peers.rank * self._call.numel
        parts = [self._view(rank, row + start, row + stop) for rank in range(self._peers.size)]
        fold(parts, self._call.reduction, self._out(start, stop))

    def _alltoall(self, start: int, stop: int) -> None:
        row = self._peers.rank * self._call.numel
        for rank in range(self._peers.size):
            place = rank * self._call.numel
            copy_flat(self._out(place + start, place + stop), self._view(rank, row + start, row + stop))

    def _alltoall_v(self, start: int, stop: int) -> None:
        place = 0
        for rank, notice in enumerate(self._notices):
            row, length = rows(notice.call, self._peers.size)[self._peers.rank]
            end = min(stop, length)
            if start < end:
                copy_flat(self._out(place + start, place + end), self._view(rank, row + start, row + end))
            place += length

    _MOVES: ClassVar[dict[str, Callable[[Exchange, int, int], None]]] = {
        "allreduce": _allreduce,
        "reduce": _reduce,
        "broadcast": _broadcast,
        "allgather": _allgather,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        "alltoall": _alltoall,
        "alltoall_v": _alltoall_v,
    }
