"""Execution traces in the format of MLCommons Chakra, which network simulators such as ASTRA-sim replay.

A file for each rank: what the model and the exchanges computed, and calls, with what each of them had to wait for. It
holds messages of protocol buffers, each with its length before it, as ``et_def.proto`` of mlcommons/chakra has them.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from bagua.observe.timeline import read_traces

Line = Mapping[str, Any]
#: Numbers of ``NodeType`` and of ``CollectiveCommType``, and the version of the format.
_COMPUTES, _SENDS, _RECEIVES, _COLLECTIVE = 4, 5, 6, 7
_COLLECTIVES = {"allreduce": 0, "reduce": 1, "allgather": 2, "gather": 3, "scatter": 4, "broadcast": 5}
_COLLECTIVES |= {"alltoall": 6, "alltoall_v": 6, "reduce_scatter": 7, "barrier": 9}
_VERSION = "0.0.4"


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _text(tag: int, value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return _varint(tag << 3 | 2) + _varint(len(content)) + content


def _attribute(name: str, value: bool | int | str) -> bytes:
    if isinstance(value, str):
        return _text(1, name) + _text(29, value)
    return _text(1, name) + _number(27 if isinstance(value, bool) else 9, int(value))


@dataclass
class _Node:
    """Something that a rank did: it began, and took, so many microseconds, after other nodes had ended."""

    number: int
    name: str
    kind: int
    begun: float
    took: float
    after: tuple[int, ...]
    facts: dict[str, bool | int | str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """A ``Node``."""
        fields = [_number(1, self.number), _text(2, self.name), _number(3, self.kind)]
        fields += [_number(5, number) for number in self.after]
        fields += [_number(6, round(self.begun)), _number(7, round(self.took))]
        fields += [_text(10, _attribute(name, value)) for name, value in {"is_cpu_op": True, **self.facts}.items()]
        return b"".join(fields)


class _Builder:
    """Makes nodes of the lines of one rank.

    Args:
        rank: the rank.
        lines: calls and spans, with the moments at which they began and ended.
    """

    def __init__(self, rank: int, lines: Sequence[Line]) -> None:
        self._rank = rank
        self._calls = sorted((line for line in lines if "call" in line), key=itemgetter("begun"))
        spans: dict[str, list[Line]] = defaultdict(list)
        for line in sorted((line for line in lines if "span" in line), key=itemgetter("begun")):
            spans[line["track"]].append(line)
        self._spans = spans
        self.nodes: list[_Node] = []
        #: When the calls and exchanges end that the thread which computes waits for later, and their last nodes.
        self._flying: list[tuple[float, int]] = []
        moments = [line["begun"] for line in (*self._calls, *spans["model"])]
        self._at = self._start = min(moments, default=0.0)
        self._last: tuple[int, ...] = ()

    def build(self) -> list[_Node]:
        """All nodes, each after those that it waits for."""
        mine = self._calls_by_work()
        starts: dict[str, list[float]] = defaultdict(list)
        for line in self._spans["exchanges"]:
            starts[line["span"]].append(line["begun"])
        events: list[tuple[float, float, Line | None, Sequence[Line]]] = []
        for number, work in enumerate(self._spans["work"]):
            began = starts[work["span"].removeprefix("run ")]
            events.append((began.pop(0) if began else work["begun"], 0.0, work, mine[number]))
        events += [(line["begun"], line["ended"], None, ()) for line in self._spans["waits"]]
        events += [(line["begun"], line["ended"], None, (line,)) for line in mine[-1]]
        for begun, ended, run, calls in sorted(events, key=lambda event: event[:2]):
            self._compute_until(begun)
            if run is not None:
                self._flying.append((run["ended"], self._chain(run, calls)))
            else:
                self._stand_still(ended, calls)
        self._compute_until(max((line["ended"] for line in self._spans["model"]), default=self._at))
        return self.nodes

    def _calls_by_work(self) -> dict[int, list[Line]]:
        """Calls by the number of the run that made them; -1: by the code that computes, which stood still."""
        found: dict[int, list[Line]] = defaultdict(list)
        later, running = deque(enumerate(self._spans["work"])), []
        for call in self._calls:
            while later and later[0][1]["begun"] <= call["begun"]:
                running.append(later.popleft())
            running = [one for one in running if one[1]["ended"] >= call["begun"]]
            runs = (number for number, work in running if call["label"].startswith(work["group"]))
            found[next(runs, -1)].append(call)
        return found

    def _add(self, name: str, kind: int, begun: float, ended: float, after: tuple[int, ...]) -> _Node:
        node = _Node(len(self.nodes) + 1, name, kind, begun - self._start, max(ended - begun, 0.0), after)
        self.nodes.append(node)
        return node

    def _compute_until(self, moment: float) -> None:
        """The thread that computes went on until then."""
        if moment > self._at:
            self._last = (self._add("compute", _COMPUTES, self._at, moment, self._last).number,)
            self._at = moment

    def _stand_still(self, until: float, calls: Iterable[Line]) -> None:
        """The thread that computes made ``calls``, or waited for what had been started, until then."""
        for call in calls:
            self._last = (self._call(call, self._last),)
        self._at = max(self._at, until)
        self._last += tuple(number for ended, number in self._flying if ended <= until)
        self._flying = [(ended, number) for ended, number in self._flying if ended > until]

    def _chain(self, work: Line, calls: Iterable[Line]) -> int:
        """What one exchange did, one after the other; the number of its last node."""
        at, after = work["begun"], self._last
        for call in calls:
            if call["begun"] > at:
                after = (self._add(work["span"], _COMPUTES, at, call["begun"], after).number,)
            after, at = (self._call(call, after),), call["ended"]
        if work["ended"] > at or not after:
            after = (self._add(work["span"], _COMPUTES, at, max(work["ended"], at), after).number,)
        return after[0]

    def _call(self, call: Line, after: tuple[int, ...]) -> int:
        facts: dict[str, bool | int | str] = {"comm_size": call["bytes"], "pg_name": call["label"]}
        if call["kind"] in _COLLECTIVES:
            node = self._add(call["call"], _COLLECTIVE, call["begun"], call["ended"], after)
            node.facts = {"comm_type": _COLLECTIVES[call["kind"]], **facts}
            return node.number
        source, destination = call["between"]
        for kind, does in ((_SENDS, call["kind"] != "recv"), (_RECEIVES, call["kind"] != "send")):
            if does:
                node = self._add(call["call"], kind, call["begun"], call["ended"], after)
                ends = (self._rank, destination) if kind == _SENDS else (source, self._rank)
                known = {name: end for name, end in zip(("comm_src", "comm_dst"), ends, strict=True) if end >= 0}
                node.facts = {**facts, **known, "comm_tag": 0}
        return node.number


def write_chakra(folder: str | os.PathLike[str], prefix: str | os.PathLike[str]) -> list[Path]:
    """Write an execution trace of each rank, to ``PREFIX.RANK.et``.

    Args:
        folder: folder that ``BAGUA_TRACE`` named, for the traces of the latest job; or the folder of a job.
        prefix: path of the files without their endings.

    Returns:
        The files.

    Raises:
        ConfigurationError: there is no trace.
    """
    written = []
    for rank, lines in read_traces(folder).items():
        nodes = _Builder(rank, [line for line in lines[1:] if "begun" in line]).build()
        path = Path(f"{os.fspath(prefix)}.{rank}.et")
        about = {"rank": rank, "world_size": len(lines[0]["ranks"])}
        first = _text(1, _VERSION) + b"".join(_text(2, _attribute(name, value)) for name, value in about.items())
        path.write_bytes(
            b"".join(_varint(len(message)) + message for message in (first, *(node.encoded() for node in nodes)))
        )
        written.append(path)
    return written
