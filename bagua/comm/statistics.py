"""Counters of what a communicator did, and the ring buffer of its last calls."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from bagua.comm.call import Call

__all__ = ["KindStatistics", "Statistics", "merge"]

#: Calls remembered for the message of a failure.
HISTORY_LENGTH = 16


class KindStatistics(NamedTuple):
    """Totals of one kind of call.

    Attributes:
        calls: completed calls.
        bytes: bytes of this rank's inputs.
        sent_bytes: bytes that this rank sends when the call is done with the
            bandwidth-optimal algorithm (averaged over ranks for trees): what a link must
            carry at least, not what a network card counted.
        seconds: time spent inside calls and their ``wait``.
    """

    calls: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0


#: Kinds in which every rank sends as much as the others, when trees are averaged over ranks.
_EVEN = ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier")


def _sent_evenly(kind: str, volume: int, size: int) -> int:
    """Bytes sent for calls of an even kind whose inputs sum up to ``volume`` bytes."""
    if kind == "allreduce":
        return 2 * volume * (size - 1) // size
    if kind in ("reduce", "broadcast"):
        return volume * (size - 1) // size
    return volume * (size - 1)


def _sent_by(call: Call, rank: int, size: int) -> int:
    """Bytes that ``rank`` sends for a call in which ranks do different things."""
    share = call.nbytes
    if call.kind == "alltoall_v":
        return share - call.send_counts[rank] * call.dtype.itemsize
    times = {
        "gather": int(rank != call.root),
        "scatter": (size - 1) * int(rank == call.root),
        "send": 1,
        "sendrecv": int(call.root != rank),
    }
    return share * times.get(call.kind, 0)


class Statistics:
    """What one communicator did. Written by one thread at a time, read by any."""

    __slots__ = ("_rank", "_size", "_totals", "recent")

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        #: Calls, seconds, bytes, and bytes sent; the last one stays 0 for even kinds, where it follows from the bytes.
        self._totals: dict[str, list[float]] = {}
        self.recent: deque[Call] = deque(maxlen=HISTORY_LENGTH)

    def add(self, call: Call, seconds: float) -> None:
        """Count one completed call."""
        kind = call[0]
        total = self._totals.get(kind)
        if total is None:
            total = self._totals.setdefault(kind, [0, 0.0, 0, 0])
        total[0] += 1
        total[1] += seconds
        if kind in _EVEN:
            total[2] += call[3] * call[2].itemsize
        else:
            total[2] += call.nbytes
            total[3] += _sent_by(call, self._rank, self._size)

    def snapshot(self) -> dict[str, KindStatistics]:
        """Totals by kind."""
        return {
            kind: KindStatistics(
                int(calls),
                int(volume),
                _sent_evenly(kind, int(volume), self._size) if kind in _EVEN else int(sent),
                seconds,
            )
            for kind, (calls, seconds, volume, sent) in list(self._totals.items())
        }

    def history(self) -> tuple[str, ...]:
        """The last calls, oldest first."""
        return tuple(str(call) for call in list(self.recent))


def merge(tables: list[dict[str, KindStatistics]]) -> dict[str, KindStatistics]:
    """Sum of several snapshots, by kind."""
    totals: dict[str, KindStatistics] = {}
    for table in tables:
        for kind, more in table.items():
            have = totals.get(kind, KindStatistics())
            totals[kind] = KindStatistics(
                have.calls + more.calls,
                have.bytes + more.bytes,
                have.sent_bytes + more.sent_bytes,
                have.seconds + more.seconds,
            )
    return totals
