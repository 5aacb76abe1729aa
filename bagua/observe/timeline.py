"""One timeline of all ranks, from the traces that each of them wrote.

Clocks of hosts differ. No rank leaves a collective before all have come to it, so for each collective of two ranks

    begun on A - ended on B  <=  clock of A - clock of B  <=  ended on A - begun on B

and many collectives leave a narrow interval: what the smallest round trip of all allows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.errors import ConfigurationError
from bagua.observe.trace import TRACE_PREFIX

__all__ = ["clock_offsets", "timeline", "write_timeline"]

Line = dict[str, Any]
#: Kinds that no rank leaves before all have come.
_MEETINGS = frozenset({"allreduce", "allgather", "alltoall", "reduce_scatter", "barrier"})


def read_traces(folder: str | os.PathLike[str]) -> dict[int, list[Line]]:
    """The lines of each rank, the first of which says who it is.

    Raises:
        ConfigurationError: there is no trace, or one that is none of ours.
    """
    paths = sorted(Path(folder).glob(f"{TRACE_PREFIX}*.jsonl"))
    if not paths:
        raise ConfigurationError(
            "there is no trace here",
            argument="folder",
            expected=f"files {TRACE_PREFIX}0.jsonl, {TRACE_PREFIX}1.jsonl, ...",
            seen=str(folder),
            advice="Start the job with BAGUA_TRACE=DIR.",
        )
    traces = {}
    for path in paths:
        lines = list(_lines(path))
        if not lines or "rank" not in lines[0]:
            raise ConfigurationError(
                "this is no trace of bagua", argument="folder", expected="what BAGUA_TRACE wrote", seen=str(path)
            )
        traces[int(lines[0]["rank"])] = lines
    return traces


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8") as file:
        for text in file:
            try:
                yield json.loads(text)
            except ValueError:  # The last line of a process that was killed.
                return


def clock_offsets(traces: Mapping[int, Sequence[Line]]) -> dict[int, float]:
    """For each rank what its clock shows more than that of the lowest rank, in microseconds.

    Args:
        traces: the lines of each rank.

    Example:
        >>> call = {"call": "", "kind": "barrier", "label": "world", "sequence": 1, "ranks": [0, 1]}
        >>> clock_offsets({0: [{**call, "begun": 0.0, "ended": 10.0}], 1: [{**call, "begun": 105.0, "ended": 109.0}]})
        {0: 0.0, 1: 102.0}
    """
    reference = min(traces)
    own = _meetings(traces[reference])
    offsets = {}
    for rank, lines in traces.items():
        least, most = float("-inf"), float("inf")
        for key, (begun, ended) in _meetings(lines).items():
            if key in own and rank != reference:
                least = max(least, begun - own[key][1])
                most = min(most, ended - own[key][0])
        known = least > float("-inf")
        offsets[rank] = (least + most) / 2 if known else 0.0
    return offsets


def _meetings(lines: Sequence[Line]) -> dict[tuple[Any, ...], tuple[float, float]]:
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
        folder: what ``BAGUA_TRACE`` named, with the files of all ranks.

    Returns:
        What ``json.dump`` writes.

    Raises:
        ConfigurationError: there is no trace.
    """
    traces = read_traces(folder)
    offsets = clock_offsets(traces)
    times = [line["begun"] - offsets[rank] for rank, lines in traces.items() for line in lines if "begun" in line]
    start = min(times, default=0.0)
    shifts = {rank: offset + start for rank, offset in offsets.items()}
    events = [event for rank, lines in traces.items() for event in _of_rank(rank, lines, shifts[rank])]
    events += _arrivals(traces, shifts)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"clock_offsets_us": offsets}}


def write_timeline(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Write the timeline of the traces in ``folder`` to ``path``; how many events it has.

    Raises:
        ConfigurationError: there is no trace.
    """
    made = timeline(folder)
    Path(path).write_text(json.dumps(made), encoding="utf-8")
    return len(made["traceEvents"])


def _since(moment: float, start: float) -> float:
    """Microseconds after ``start``. Of times as large as these, floats know a quarter of one."""
    return max(moment - start, 0.0)


def _of_rank(rank: int, lines: Sequence[Line], shift: float) -> Iterator[Line]:
    first = lines[0]
    yield _name("process_name", rank, 0, f"rank {rank} on {first.get('host', '?')}")
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


def _arrivals(traces: Mapping[int, Sequence[Line]], shifts: Mapping[int, float]) -> Iterator[Line]:
    """For each collective a bar from the first to come to the last one, and a tick for each rank."""
    process = max(traces) + 1
    yield _name("process_name", process, 0, "arrivals")
    labels: dict[str, int] = {}
    for (label, _, _), comers in _comers(traces, shifts).items():
        if label not in labels:
            labels[label] = len(labels) + 1
            yield _name("thread_name", process, labels[label], f"arrivals on {label}")
        came = {rank: moment for rank, (moment, _) in comers.items()}
        first, last = min(came.values()), max(came.values())
        late = {f"rank {rank} came after, us": round(moment - first, 1) for rank, moment in sorted(came.items())}
        place = {"pid": process, "tid": labels[label]}
        text = next(iter(comers.values()))[1]
        yield {"ph": "X", "name": text, "cat": "arrivals", "ts": first, "dur": last - first, "args": late, **place}
        for rank, moment in came.items():
            yield {"ph": "i", "s": "t", "name": f"rank {rank}", "cat": "arrivals", "ts": moment, **place}


def _comers(
    traces: Mapping[int, Sequence[Line]], shifts: Mapping[int, float]
) -> dict[tuple[Any, ...], dict[int, tuple[float, str]]]:
    """For each collective when each rank came, and what it was."""
    found: dict[tuple[Any, ...], dict[int, tuple[float, str]]] = {}
    for rank, lines in traces.items():
        for line in lines:
            if "call" in line and line["kind"] not in ("send", "recv", "sendrecv"):
                found.setdefault(_key(line), {})[rank] = (_since(line["begun"], shifts[rank]), line["call"])
    return found
