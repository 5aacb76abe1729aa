"""Traces: what one rank does and when, line by line into a file; and one timeline of all ranks, from their traces.

Clocks of hosts differ; ranks of one host have the same. No rank leaves a collective before all have come to it, so for
each collective of two ranks

    begun on A - ended on B  <=  clock of A - clock of B  <=  ended on A - begun on B

and many collectives leave an interval. The median of ended on A - ended on B is taken, or the end of the interval next
to it: all leave a collective together. The middle of the interval would take half of the time by which a rank is always
late for its clock. Hosts of one name are one host, unless no clock fits all of its ranks. Ranks that never met are
compared through others. If that is not possible either, it is unknown how their clocks differ, and the timeline says
so.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.comm import LATE_SHARE, CallRecord, Place, Recorder
from bagua.observe.folders import NO_LINK, folder_of_latest_job, not_readable, not_writable, usable_folder, write_whole
from bagua.observe.straggler import Reading, latest_rank

TRACE_PREFIX = "trace_rank_"
#: Lines of one rank, at most: about 50 MB.
MOST_LINES = 250_000
#: Lines that wait in memory, and for how many seconds at most: a process may be killed.
_BATCH, _PAUSE_S = 512, 2.0
_log = logging.getLogger("bagua")
Line = dict[str, Any]
_Meetings = dict[tuple[Any, ...], tuple[float, float]]
_Comers = dict[tuple[Any, ...], tuple[str, dict[int, float]]]
_FILES = f"{TRACE_PREFIX}*.jsonl"
#: Kinds that no rank leaves before all have come.
_MEETINGS = frozenset({"allreduce", "allgather", "alltoall", "reduce_scatter", "barrier"})


class TraceFile:
    """Writes JSON lines: first who this rank is, then its calls and spans. Times are microseconds of this host's clock.

    Args:
        recorder: recorder of the rank; its clock gives the times.
        place: place of this rank among all.
        folder: folder to write into, in a folder of the job.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """

    def __init__(self, recorder: Recorder, place: Place, folder: str) -> None:
        rank = place.ranks[place.rank]
        path = usable_folder(folder, "BAGUA_TRACE") / recorder.job
        self._path = usable_folder(str(path), "BAGUA_TRACE") / f"{TRACE_PREFIX}{rank}.jsonl"
        self._epoch_s = time.time() - recorder.clock()
        self._process = os.getpid()
        self._numbers = itertools.count(1)
        self._ended = False
        self._flush_at = time.monotonic() + _PAUSE_S
        self._lock = threading.Lock()
        first = {"rank": rank, "ranks": list(place.ranks), "host": socket.gethostname(), "pid": os.getpid()}
        #: Threads, and signal handlers, put lines in at one end; the thread that writes takes them out at the other.
        self._waiting: deque[dict[str, Any]] = deque()
        try:
            write_whole(self._path, f"{json.dumps(first)}\n".encode())
        except OSError as error:  # The disk is full, or the file is somebody else's.
            raise not_writable(f"the trace cannot be written: {error}", "BAGUA_TRACE", folder) from error

    def call(self, record: CallRecord) -> None:
        """See ``TraceSink``."""
        call, place = record.call, record.place
        line = {
            "call": str(call),
            "kind": call.kind,
            "sequence": call.sequence,
            "label": place.label,
            "ranks": place.ranks,
            "bytes": call.nbytes,
            "begun": self._us(record.begun),
            "ended": self._us(record.ended),
            "waited": round(record.waited_s * 1e6, 1),
            "last": record.waited_for,
        }
        self._add(line)

    def span(self, name: str, begun: float, ended: float, facts: dict[str, Any]) -> None:
        """See ``TraceSink``."""
        self._add({"span": name, "begun": self._us(begun), "ended": self._us(ended), **facts})

    def _us(self, moment: float) -> float:
        return round((moment + self._epoch_s) * 1e6, 1)

    def _add(self, line: dict[str, Any]) -> None:
        if self._ended or os.getpid() != self._process:  # A forked child has nothing to say here.
            return
        number = next(self._numbers)
        if number > MOST_LINES:
            return
        self._waiting.append(line if number < MOST_LINES else {"cut": MOST_LINES})
        now = time.monotonic()
        if len(self._waiting) >= _BATCH or now > self._flush_at or number == MOST_LINES:
            self._flush_at = now + _PAUSE_S
            self.flush()

    def flush(self) -> None:
        """Write what waits, unless another thread, or the code that a signal has interrupted, is at it and does so."""
        if os.getpid() != self._process:
            return
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                self._write()
            finally:
                self._lock.release()

    def _write(self) -> None:
        try:
            with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_APPEND | NO_LINK), "a", encoding="utf-8") as file:
                while self._waiting:
                    file.write(json.dumps(self._waiting.popleft()) + "\n")
        except OSError as error:  # The disk is full, say: training goes on.
            self._ended = True
            self._waiting.clear()
            _log.warning("trace: %s ends here: %s", self._path, error)

    def close(self) -> None:
        """Write the rest."""
        self._ended = True
        self.flush()


def read_traces(folder: str | os.PathLike[str]) -> dict[int, list[Line]]:
    """The lines of each rank, the first of which says who it is.

    Args:
        folder: folder that ``BAGUA_TRACE`` named, for the traces of the latest job; or the folder of a job.

    Raises:
        ConfigurationError: there is no trace, or one that is none of ours.
    """
    paths = sorted(folder_of_latest_job(folder, _FILES).glob(_FILES))
    if not paths:
        expected = f"files {TRACE_PREFIX}0.jsonl, {TRACE_PREFIX}1.jsonl, ..."
        raise not_readable("there is no trace here", expected, folder, "Start the job with BAGUA_TRACE=DIR.")
    traces = {}
    for path in paths:
        lines = list(_lines(path))
        if not lines and not path.stat().st_size:  # The disk was full.
            continue
        if not lines or "rank" not in lines[0]:
            raise not_readable("this is no trace of bagua", "what BAGUA_TRACE wrote", path)
        traces[int(lines[0]["rank"])] = lines
    if not traces:
        raise not_readable("all traces are empty", "what BAGUA_TRACE wrote", folder)
    return traces


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                yield json.loads(text)
            except ValueError:  # The last line of a process that was killed.
                return


def clock_offsets(traces: Mapping[int, Sequence[Line]]) -> dict[int, float | None]:
    """For each rank what its clock shows more than that of the lowest rank, in microseconds; None if it is unknown.

    Args:
        traces: the lines of each rank.

    Example:
        >>> call = {"call": "", "kind": "barrier", "label": "world", "sequence": 1, "ranks": [0, 1]}
        >>> clock_offsets({0: [{**call, "begun": 0.0, "ended": 10.0}], 1: [{**call, "begun": 105.0, "ended": 109.0}]})
        {0: 0.0, 1: 99.0}
    """
    meetings = {rank: _meetings(lines) for rank, lines in traces.items()}
    hosts = {rank: next((line["host"] for line in lines[:1] if "host" in line), None) for rank, lines in traces.items()}
    known = {min(traces): 0.0}
    while found := _one_more(known, meetings, hosts):
        known |= found
    return {rank: known.get(rank) for rank in traces}


def _one_more(
    known: Mapping[int, float], meetings: Mapping[int, _Meetings], hosts: Mapping[int, object]
) -> dict[int, float]:
    """The offsets of those who can be compared with some of ``known``."""
    found = {}
    for rank in meetings.keys() - known.keys():
        for other, offset in known.items():
            same_host = hosts[rank] is not None and hosts[rank] == hosts[other]
            difference = _difference(meetings[rank], meetings[other], same_host=same_host)
            if difference is not None:
                found[rank] = offset + difference
                break
    return found


def _difference(own: _Meetings, other: _Meetings, *, same_host: bool) -> float | None:
    """By how much a clock is ahead of another one, if their ranks have met, or are on one host."""
    met = [(own[key], other[key]) for key in own.keys() & other.keys()]
    if not met:
        return 0.0 if same_host else None
    least = max(begun - other_ended for (begun, _), (_, other_ended) in met)
    most = min(ended - other_begun for (_, ended), (other_begun, _) in met)
    leaving = statistics.median(ended - other_ended for (_, ended), (_, other_ended) in met)
    if same_host and least <= 0.0 <= most:  # Clones of a machine have one name, and many clocks.
        return 0.0
    return min(max(leaving, least), most)


def _meetings(lines: Sequence[Line]) -> _Meetings:
    return {_key(line): (line["begun"], line["ended"]) for line in lines if line.get("kind") in _MEETINGS}


def _key(line: Line) -> tuple[Any, ...]:
    """What the lines of one collective have in common on all ranks."""
    return line["label"], tuple(line["ranks"]), line["sequence"]


def timeline(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """One Chrome trace of all ranks, which ``ui.perfetto.dev`` and ``chrome://tracing`` show.

    Each rank is a process with one track for the model, one for exchanges, one for what the training thread waits
    for, and one for each communicator. A process ``arrivals`` has for each collective a bar from the first rank that
    comes to the last one, and a tick for each rank.

    Args:
        folder: folder that ``BAGUA_TRACE`` named, for the traces of the latest job; or the folder of a job. It holds
            the files of all ranks.

    Returns:
        What ``json.dump`` writes. ``otherData`` has the differences between clocks, None where one is unknown; for how
        long the others waited for each rank that came last to a collective; for whom most, -1 if none stands out; and
        the ranks whose traces are not here.

    Raises:
        ConfigurationError: there is no trace.
    """
    traces = read_traces(folder)
    differences = clock_offsets(traces)
    offsets = {rank: offset or 0.0 for rank, offset in differences.items()}
    times = [line["begun"] - offsets[rank] for rank, lines in traces.items() for line in lines if "begun" in line]
    start = min(times, default=0.0)
    shifts = {rank: offset + start for rank, offset in offsets.items()}
    unknown = [rank for rank, offset in differences.items() if offset is None]
    events = [
        event
        for rank, lines in traces.items()
        for event in _of_rank(rank, lines, shifts[rank], ", whose clock was compared with no other" * (rank in unknown))
    ]
    compared = traces.keys() - set(unknown)
    comers: _Comers = {}  # For each collective what it was, and when each rank came.
    for rank in sorted(compared):
        for line in traces[rank]:
            if "call" in line and line["kind"] not in ("send", "recv", "sendrecv"):
                _, came = comers.setdefault(_key(line), (line["call"], {}))
                came[rank] = _since(line["begun"], shifts[rank])
    events += _arrivals(max(traces) + 1, comers)
    waits, lasts = _waits(comers)
    spent_s = (max(times, default=0.0) - start) * 1e-6 * max(len(traces) - 1, 1)
    blamed = {rank: waited_us * 1e-6 for rank, waited_us in waits.items()}
    everyone = {rank for lines in traces.values() for rank in lines[0].get("ranks", ())}
    facts = {
        "ranks_without_trace": sorted(everyone - traces.keys()),
        "clock_offsets_us": differences,
        "waited_for_us": waits,
        "straggler": latest_rank({-1: Reading(spent_s, blamed, 0.0, lasts)}),
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def write_timeline(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Write the timeline of the traces in ``folder`` to ``path``, and return it.

    Raises:
        ConfigurationError: there is no trace.
    """
    made = timeline(folder)
    Path(path).write_text(json.dumps(made), encoding="utf-8")
    return made


def _since(moment: float, start: float) -> float:
    """Microseconds after ``start``. Of times as large as these, floats know a quarter of one."""
    return max(moment - start, 0.0)


def _of_rank(rank: int, lines: Sequence[Line], shift: float, remark: str) -> Iterator[Line]:
    first = lines[0]
    yield _name("process_name", rank, 0, f"rank {rank} on {first.get('host', '?')}{remark}")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    tracks: dict[str, int] = {}
    for line in lines[1:]:
        if "begun" not in line:
            continue
        track = str(line["track"]) if "span" in line else f"calls on {line['label']}"
        if track not in tracks:
            tracks[track] = len(tracks) + 1
            yield _name("thread_name", rank, tracks[track], track)
        facts = {key: value for key, value in line.items() if key not in ("begun", "ended", "span", "track", "call")}
        yield {
            "ph": "X",
            "name": line.get("span") or line["call"],
            "cat": "span" if "span" in line else line["kind"],
            "pid": rank,
            "tid": tracks[track],
            "ts": _since(line["begun"], shift),
            "dur": max(line["ended"] - line["begun"], 0.0),
            "args": facts,
        }


def _name(kind: str, process: int, thread: int, name: str) -> Line:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _waits(comers: _Comers) -> tuple[dict[int, float], dict[int, float]]:
    """By rank, for how long, in us, the others have waited for it, where it came last, and how often that was late."""
    waits: dict[int, float] = {}
    lasts: dict[int, float] = {}
    before: dict[tuple[Any, ...], float] = {}
    for (*where, _), (_, came) in comers.items():
        group = tuple(where)  # Several groups may have one label.
        last = max(came, key=lambda rank: came[rank])
        waits[last] = waits.get(last, 0.0) + sum(came[last] - moment for moment in came.values())
        since, before[group] = came[last] - before.get(group, min(came.values())), came[last]
        lasts[last] = lasts.get(last, 0.0) + (came[last] - min(came.values()) > LATE_SHARE * since)
    return {rank: round(waits[rank], 1) for rank in sorted(waits)}, lasts


def _arrivals(process: int, of_calls: _Comers) -> Iterator[Line]:
    """For each collective a bar from the first to come to the last one, and a tick for each rank."""
    yield _name("process_name", process, 0, "arrivals")
    tracks: dict[tuple[Any, ...], int] = {}
    labels = {(label, ranks) for label, ranks, _ in of_calls}
    shared = {label for label, count in Counter(label for label, _ in labels).items() if count > 1}
    for (label, ranks, _), (text, came) in of_calls.items():
        if (label, ranks) not in tracks:
            tracks[label, ranks] = len(tracks) + 1
            of_ranks = f" of ranks {', '.join(map(str, ranks))}" if label in shared else ""
            yield _name("thread_name", process, tracks[label, ranks], f"arrivals on {label}{of_ranks}")
        first, last = min(came.values()), max(came.values())
        late = {f"rank {rank} came after, us": round(moment - first, 1) for rank, moment in sorted(came.items())}
        place = {"pid": process, "tid": tracks[label, ranks]}
        yield {"ph": "X", "name": text, "cat": "arrivals", "ts": first, "dur": last - first, "args": late, **place}
        for rank, moment in came.items():
            yield {"ph": "i", "s": "t", "name": f"rank {rank}", "cat": "arrivals", "ts": moment, **place}
