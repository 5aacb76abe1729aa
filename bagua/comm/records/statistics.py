"""Counters of what a communicator did, and the ring buffer of its last calls."""

from __future__ import annotations

import operator
from collections import deque
from typing import NamedTuple

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.records.recorder import CallRecord, CallTimes, Place, Recorder, here

#: Calls remembered of each communicator, and how many of them the message of a failure shows.
RECORDS_LENGTH = 64
HISTORY_LENGTH = 16
#: Who comes last is late if it is waited for so large a part of the time from the end of one call to that of the next.
LATE_SHARE = 0.02
_NOTHING = (0, 0.0, 0, 0)


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
_EVEN = frozenset({"allreduce", "reduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "barrier"})


def _sent_evenly(kind: str, volume: int, size: int) -> int:
    """Bytes sent for calls of an even kind whose inputs sum up to ``volume`` bytes."""
    if kind == "allreduce":
        return 2 * volume * (size - 1) // size
    if kind in ("reduce", "broadcast"):
        return volume * (size - 1) // size
    return volume * (size - 1)


def _sent_by(call: Call, rank: int, size: int) -> int:
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


def sent_bytes(call: Call, rank: int, size: int) -> int:
    """Bytes that ``rank`` of ``size`` must send for ``call``; see ``KindStatistics.sent_bytes``."""
    return _sent_evenly(call.kind, call.nbytes, size) if call.kind in _EVEN else _sent_by(call, rank, size)


class Statistics:
    """What one communicator did. Written by one thread at a time, read by any.

    Args:
        place: communicator and rank that make the calls.
        recorder: record of the calls of the rank; None for one of its own.

    Attributes:
        recent: the last calls, oldest first.
        times: seconds that its calls took.
        waits: seconds that this rank has waited for each other one that came last, by global rank.
        lasts: how often each of them came last, and late; those that come together share a call.
        gauges: latest values of what is measured on it and changes slowly, by the name of the metric.
        aside: True if no thread that computes stands still for its calls, so that nobody is late for them.
    """

    __slots__ = ("_busy_until", "_sums", "_totals", "aside", "gauges", "lasts", "place", "recent", "recorder", "waits")

    def __init__(self, place: Place, recorder: Recorder | None = None) -> None:
        #: Calls, seconds, bytes, and bytes sent; the last one stays 0 for even kinds, where it follows from the bytes.
        #: Threads read all at once.
        self._totals: dict[str, tuple[int, float, int, int]] = {}
        self._busy_until = 0.0
        self.place = place
        self.recorder = recorder or Recorder()
        self.recent: deque[CallRecord] = deque(maxlen=RECORDS_LENGTH)
        #: Fields of ``times``. One plain value: threads read all at once, and each call makes one.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0)
        self.waits: dict[int, float] = {}
        self.lasts: dict[int, float] = {}
        self.gauges: dict[str, float] = {}
        self.aside = False
        self.recorder.add(self)

    @property
    def times(self) -> CallTimes:
        """Seconds that its calls took."""
        return CallTimes(*self._sums)

    def begin(self, call: Call, now: float) -> CallRecord:
        """A call is made."""
        recorder = self.recorder
        record = CallRecord(call, self.place, next(recorder.numbers), now)
        if here.background:
            record.blocked_s = recorder.blocked_s(now)
        self.recent.append(record)
        return record

    def end(self, record: CallRecord, ended: float, blocked_s: float) -> None:
        """Its result is there.

        Args:
            record: record of the call.
            ended: since when, by the clock of the recorder.
            blocked_s: for how long the thread that made it has stood still for it.
        """
        recorder = self.recorder
        record.ended, record.state = ended, "completed"
        if self.aside:
            record.waited_s, record.waited_for = 0.0, ()
        time_s, exposed_s, waiting_s, of_collectives_s, calls = self._sums
        before = self._busy_until
        # In each call: a builtin takes twice as long as a comparison.
        begun = record.begun if record.begun > before else before  # noqa: FURB136
        if ended > begun:
            self._busy_until = ended
            took = ended - begun
            if record.blocked_s is not None:  # A background thread stands still for it, which does no harm.
                blocked_s = recorder.blocked_s(ended) - record.blocked_s
            waited = record.waited_s
            if waited:  # Not all calls wait, and each comes here.
                waited = min(waited, took)
                waiting_s += waited
            together = took - waited
            exposed_s += blocked_s if blocked_s < together else together  # noqa: FURB136
            time_s += took
            if record.call.kind not in POINT_TO_POINT and not self.aside:
                of_collectives_s += took
        self._sums = (time_s, exposed_s, waiting_s, of_collectives_s, calls + 1)
        if record.waited_for:
            self._blame(record, record.waited_s > LATE_SHARE * (ended - before))
        if recorder.trace is not None:
            recorder.trace.call(record)
        if ended >= recorder.beat_at:
            recorder.beat()

    def _blame(self, record: CallRecord, late: bool) -> None:
        share = 1.0 / len(record.waited_for)
        for rank in record.waited_for:
            self.waits[rank] = self.waits.get(rank, 0.0) + record.waited_s * share
            if late:
                self.lasts[rank] = self.lasts.get(rank, 0.0) + share

    def add(self, call: Call, seconds: float) -> None:
        """Count one completed call."""
        kind = call[0]
        calls, before, volume, sent = self._totals.get(kind, _NOTHING)
        if kind in _EVEN:
            volume += call[3] * call[2].itemsize
        else:
            volume += call.nbytes
            sent += _sent_by(call, self.place.rank, len(self.place.ranks))
        self._totals[kind] = (calls + 1, before + seconds, volume, sent)

    def snapshot(self) -> dict[str, KindStatistics]:
        """Totals by kind."""
        return {
            kind: KindStatistics(
                calls,
                volume,
                _sent_evenly(kind, volume, len(self.place.ranks)) if kind in _EVEN else sent,
                seconds,
            )
            for kind, (calls, seconds, volume, sent) in list(self._totals.items())
        }

    def sent_bytes(self) -> int:
        """Bytes that this rank sent in calls of all kinds; see ``KindStatistics``."""
        return sum(entry.sent_bytes for entry in self.snapshot().values())

    def history(self) -> tuple[str, ...]:
        """The last calls, oldest first."""
        return tuple(str(record.call) for record in list(self.recent)[-HISTORY_LENGTH:])


def merge(tables: list[dict[str, KindStatistics]]) -> dict[str, KindStatistics]:
    """Sum of several snapshots, by kind."""
    totals: dict[str, KindStatistics] = {}
    for table in tables:
        for kind, more in table.items():
            totals[kind] = KindStatistics._make(map(operator.add, totals.get(kind, KindStatistics()), more))
    return totals
