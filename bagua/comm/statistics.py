"""Counters of what a communicator did, and the ring buffer of its last calls."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from bagua.comm.call import Call

__all__ = ["KindStatistics", "Statistics", "merge", "sent_bytes"]

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


def sent_bytes(call: Call, rank: int, size: int) -> int:
    """Bytes that ``rank`` of ``size`` sends for ``call``; see ``KindStatistics.sent_bytes``."""
    share = call.nbytes
    if call.kind == "alltoall_v":
        return share - call.send_counts[rank] * call.dtype.itemsize
    if call.kind == "allreduce":
        return 2 * share * (size - 1) // size
    if call.kind in ("reduce", "broadcast"):
        return share * (size - 1) // size
    times = {
        "allgather": size - 1,
        "reduce_scatter": size - 1,
        "alltoall": size - 1,
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
        self._totals: dict[str, list[float]] = {}
        self.recent: deque[Call] = deque(maxlen=HISTORY_LENGTH)

    def add(self, call: Call, seconds: float) -> None:
        """Count one completed call."""
        total = self._totals.get(call[0])
        if total is None:
            total = self._totals.setdefault(call[0], [0, 0, 0, 0.0])
        total[0] += 1
        total[1] += call.nbytes
        total[2] += sent_bytes(call, self._rank, self._size)
        total[3] += seconds

    def snapshot(self) -> dict[str, KindStatistics]:
        """Totals by kind."""
        return {
            kind: KindStatistics(int(calls), int(volume), int(sent), seconds)
            for kind, (calls, volume, sent, seconds) in list(self._totals.items())
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
