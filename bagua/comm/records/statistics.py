"""Totals of calls, by their kind."""

from __future__ import annotations

import operator
from typing import NamedTuple

from bagua.comm.call import Call


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
EVEN = frozenset({"allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier"})


def sent_evenly(kind: str, volume: int, size: int) -> int:
    """Bytes sent for calls of an even kind whose inputs sum up to ``volume`` bytes."""
    if kind == "allreduce":
        return 2 * volume * (size - 1) // size
    if kind in ("reduce", "broadcast"):
        return volume * (size - 1) // size
    return volume * (size - 1)


def sent_by(call: Call, rank: int, size: int) -> int:
    """Bytes that ``rank`` sends for a call in which ranks do different things."""
    if call.kind == "recv":
        return 0
    share = call.nbytes
    if call.kind == "send":
        return share
    if call.kind == "alltoall_v":
        return share - call.send_counts[rank] * call.dtype.itemsize
    times = {
        "gather": int(rank != call.root),
        "scatter": (size - 1) * int(rank == call.root),
        "sendrecv": int(call.root != rank),
    }
    return share * times.get(call.kind, 0)


def merge(tables: list[dict[str, KindStatistics]]) -> dict[str, KindStatistics]:
    """Sum of several snapshots, by kind."""
    totals: dict[str, KindStatistics] = {}
    for table in tables:
        for kind, more in table.items():
            totals[kind] = KindStatistics._make(map(operator.add, totals.get(kind, KindStatistics()), more))
    return totals
