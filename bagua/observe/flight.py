"""The flight record: the last calls of a rank, written when one fails or a signal comes, and what records say.

Two files for each rank, in a folder of the job: ``calls_<r>.json`` for ``explain``, ``calls_<r>.txt`` for people. Both
stay as the first failure of the rank has left them; what comes after it is in ``calls_<r>_later.txt``.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from bagua.comm import CallRecord, Place, Recorder
from bagua.observe.folders import folder_of_latest_job, not_readable, other_jobs, usable_folder, write_whole

#: On which a rank writes its record and goes on.
SIGNAL = signal.SIGUSR2

_MESSAGES = ("send", "recv", "sendrecv")
_log = logging.getLogger("bagua")
Record = dict[str, Any]
_FILES = "calls_*.json"


def later_name(rank: int) -> str:
    """The file with what a rank has written since its first failure."""
    return f"calls_{rank}_later.txt"


class FlightRecord:
    """Writes the last calls of one rank.

    Args:
        recorder: recorder of the rank.
        place: place of this rank among all.
        folder: folder to write into, in a folder of the job.
        listens: write on a signal, too, if this is the main thread and no other code wants the signal.

    Raises:
        ConfigurationError: the folder cannot be written to.
    """

    def __init__(self, recorder: Recorder, place: Place, folder: str, *, listens: bool = True) -> None:
        # The watch of a rank keeps this as long as the rank has its recorder, and no longer.
        self._recorder = weakref.ref(recorder)
        self._place = place
        self._folder = usable_folder(folder, "BAGUA_FLIGHT_DIR") / recorder.job
        self._epoch_s = time.time() - recorder.clock()
        self._process = os.getpid()
        self._failures = itertools.count()
        self._failed = False
        self._handles = listens and self._listen()

    def _listen(self) -> bool:
        """Write on a signal, unless somebody else wants it. Signals belong to the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        before = signal.getsignal(SIGNAL)
        record = getattr(before, "__self__", None)
        if before is not signal.SIG_DFL and not (isinstance(record, FlightRecord) and record.is_over):
            _log.info("flight record: %s has a handler already, which stays", SIGNAL.name)
            return False
        signal.signal(SIGNAL, self._on_signal)
        return True

    @property
    def is_over(self) -> bool:
        """Whether the rank was dropped without an end."""
        return self._recorder() is None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if os.getpid() == self._process:  # A forked child inherits the handler, not the calls.
            self.write(f"signal {SIGNAL.name}")

    def close(self) -> None:
        """Give the signal back, if it is still ours."""
        if self._handles and threading.current_thread() is threading.main_thread():
            self._handles = False
            if signal.getsignal(SIGNAL) == self._on_signal:
                signal.signal(SIGNAL, signal.SIG_DFL)

    def fail(self, error: BaseException) -> None:
        """Write what a call has ended with, if it is the first that fails: later failures are often those of the first.

        Args:
            error: error of the call.
        """
        first = next(self._failures) == 0  # in one step: several threads may fail at once
        self._failed = True
        self._write(str(error), first=first)

    def write(self, reason: str) -> None:
        """Write the record as it is now; what goes wrong is logged, not raised.

        Args:
            reason: why.
        """
        self._write(reason, first=not self._failed)

    def _write(self, reason: str, *, first: bool) -> None:
        recorder = self._recorder()
        if recorder is None:
            return
        rank = self._place.ranks[self._place.rank]
        records = [record for record in recorder.records() if record.state != "refused"]
        stacks = _stacks()
        text = self._text(recorder.clock(), records, reason, stacks).encode()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if first:
                record = self._record(records, reason, stacks)
                write_whole(self._folder / f"calls_{rank}.json", json.dumps(record).encode())
            write_whole(self._folder / (f"calls_{rank}.txt" if first else later_name(rank)), text)
        except OSError as error:
            _log.warning("flight record: rank %d cannot write to %s: %s", rank, self._folder, error)

    def _record(self, records: list[CallRecord], reason: str, stacks: dict[str, list[str]]) -> Record:
        return {
            "calls": [self._fact(record) for record in records],
            "rank": self._place.ranks[self._place.rank],
            "ranks": list(self._place.ranks),
            "reason": reason,
            "written_s": time.time(),
            "stacks": stacks,
        }

    def _fact(self, record: CallRecord) -> dict[str, Any]:
        call, place = record.call, record.place
        return {
            "label": place.label,
            "ranks": list(place.ranks),
            "kind": call.kind,
            "sequence": call.sequence,
            "agreement": [str(fact) for fact in call.agreement()],
            "text": str(call),
            "state": _state(record),
            "begun_s": record.begun + self._epoch_s,
            "ended_s": record.ended + self._epoch_s if record.ended else None,
        }

    def _text(self, now: float, records: list[CallRecord], reason: str, stacks: dict[str, list[str]]) -> str:
        lines = [f"rank {self._place.ranks[self._place.rank]} of {len(self._place.ranks)}, because: {reason}", ""]
        lines += ["its last calls, oldest first: seconds ago, communicator, call, state, seconds that it took"]
        for one in records:
            took = f"{one.ended - one.begun:.6f}" if one.ended else "-"
            lines.append(f"{now - one.begun:12.6f}  {one.place.label}  {one.call}  {one.state}  {took}")
        for name, frames in stacks.items():
            lines += ["", f"thread {name}, innermost call last:", *(f"  {frame}" for frame in frames)]
        return "\n".join(lines) + "\n"


def _state(record: CallRecord) -> str:
    """The state; a call may be complete although no thread has waited for it."""
    return "completed" if record.state == "started" and record.ended else record.state


def _stacks() -> dict[str, list[str]]:
    """Where each thread of this process stands. Without names: asking for them takes a lock that a signal may find."""
    main = threading.main_thread().ident
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way
    return {
        "main" if ident == main else str(ident): [
            f"{one.f_code.co_filename}:{line} in {one.f_code.co_name}" for one, line in traceback.walk_stack(frame)
        ][::-1]
        for ident, frame in frames.items()
    }


#: A group in the records: its label and its global ranks.
_Group = tuple[str, tuple[int, ...]]


def read_flight_records(folder: str | os.PathLike[str]) -> dict[int, Record]:
    """The flight records of one job, by global rank.

    Args:
        folder: folder that ``BAGUA_FLIGHT_DIR`` named, for the job that has written last; or the folder of a job.

    Raises:
        ConfigurationError: there are none, or one of them is no flight record of ours.
    """
    paths = sorted(folder_of_latest_job(folder, _FILES).glob(_FILES))
    if not paths:
        advice = "Start the job with BAGUA_FLIGHT_DIR=DIR. Ranks write there when a call fails, or on SIGUSR2."
        raise not_readable("there is no flight record here", "files calls_0.json, calls_1.json, ...", folder, advice)
    return {int(record["rank"]): record for record in map(_read, paths)}


def _read(path: Path) -> Record:
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        record["calls"], record["rank"], record["ranks"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        problem = f"this is no flight record of bagua: {error}"
        raise not_readable(problem, "files that bagua has written", path) from error
    return record


def explain(folder: str | os.PathLike[str]) -> list[str]:
    """What went wrong, as far as the flight records in ``folder`` tell it.

    Args:
        folder: folder that ``BAGUA_FLIGHT_DIR`` named, for the job that has written last; or the folder of a job. It
            holds the files of all ranks.

    Returns:
        Sentences, the likeliest cause first.

    Raises:
        ConfigurationError: there is no flight record, or it cannot be read.
    """
    records = read_flight_records(folder)
    groups = _groups(records)
    sentences = [sentence for group in groups for sentence in _disagreements(group, groups[group])]
    sentences += [sentence for group in groups for sentence in _absences(group, groups[group], records)]
    sentences += _silent(records)
    sentences += _messages(records)
    if not sentences:
        sentences = ["All ranks made the same calls, and none was under way."]
    sentences += [f"Rank {rank} wrote its record because: {_first_line(one)}" for rank, one in records.items()]
    return sentences + _elsewhere(Path(folder), records)


def _elsewhere(folder: Path, records: Mapping[int, Record]) -> list[str]:
    """What is not told here, and where it is."""
    latest = folder_of_latest_job(folder, _FILES)
    later = [rank for rank in records if (latest / later_name(rank)).exists()]
    sentences = [f"Rank {rank} wrote again after its first failure: {latest / later_name(rank)}" for rank in later]
    others = [] if latest == folder else other_jobs(folder, latest, _FILES)
    if others:
        what = "is another job" if len(others) == 1 else f"are {len(others)} other jobs"
        sentences.append(f"All this is of {latest}. In {folder} there {what}: {', '.join(others[-4:])}.")
    return sentences


def _first_line(record: Record) -> str:
    return str(record["reason"]).partition("\n")[0]


def _groups(records: Mapping[int, Record]) -> dict[_Group, dict[int, dict[int, Record]]]:
    """By group and rank its collectives, by their number."""
    groups: dict[_Group, dict[int, dict[int, Record]]] = {}
    for rank, record in records.items():
        for call in record["calls"]:
            if call["kind"] not in _MESSAGES:
                of_group = groups.setdefault((call["label"], tuple(call["ranks"])), {})
                of_group.setdefault(rank, {})[call["sequence"]] = call
    return groups


def _disagreements(group: _Group, calls: dict[int, dict[int, Record]]) -> Iterator[str]:
    """The first call that is not the same on all ranks."""
    common = set.intersection(*(set(of_rank) for of_rank in calls.values()))
    for sequence in sorted(common):
        by_agreement: dict[tuple[str, ...], list[int]] = {}
        for rank, of_rank in calls.items():
            by_agreement.setdefault(tuple(of_rank[sequence]["agreement"]), []).append(rank)
        if len(by_agreement) > 1:
            sides = {tuple(side): _what(calls[side[0]][sequence]) for side in sorted(by_agreement.values(), key=len)}
            does = [f"{_ranks(side)} {'does' if len(side) == 1 else 'do'} {what}" for side, what in sides.items()]
            yield f"In call #{sequence} on {group[0]}, {', '.join(does[:-1])}, while {does[-1]}."
            return


def _what(call: Record) -> str:
    return str(call["text"]).partition(" ")[2]


def _absences(group: _Group, calls: dict[int, dict[int, Record]], records: Mapping[int, Record]) -> Iterator[str]:
    """The first call to which some ranks have not come, or came when the others had given up."""
    label, members = group
    open_calls = [number for of_rank in calls.values() for number in of_rank if _stands_in(of_rank, number)]
    if not open_calls:
        return
    sequence = min(open_calls)
    # By the records: between islands a member has another number in the next epoch than the one it signs with.
    here = sorted(rank for rank, of_rank in calls.items() if _stands_in(of_rank, sequence))
    absent = [rank for rank in members if rank in records and rank not in here and not _is_past(calls, rank, sequence)]
    begun_s = min(calls[rank][sequence]["begun_s"] for rank in here)
    # A rank that had written its record before may have come all the same.
    unknown = [rank for rank in absent if records[rank]["written_s"] < begun_s]
    missing = [rank for rank in absent if rank not in unknown]
    what = _what(calls[here[0]][sequence])
    if missing:
        yield f"{_ranks(here)} came to call #{sequence} on {label}, {what}, and {_ranks(missing)} did not."
    for rank in missing:
        yield _position(rank, label, calls.get(rank, {}), sequence, records[rank])
    for rank in unknown:
        yield f"{_ranks(here)} came to call #{sequence} on {label}, {what}. Rank {rank} had written its record before."


def _stands_in(of_rank: Mapping[int, Record], sequence: int) -> bool:
    return sequence in of_rank and of_rank[sequence]["state"] in ("started", "failed")


def _is_past(calls: dict[int, dict[int, Record]], rank: int, sequence: int) -> bool:
    of_rank = calls.get(rank, {})
    found = of_rank.get(sequence)
    return found["state"] == "completed" if found is not None else max(of_rank, default=0) > sequence


def _position(rank: int, label: str, of_rank: Mapping[int, Record], sequence: int, record: Record) -> str:
    before = [call for number, call in of_rank.items() if number < sequence]
    if of_rank.get(sequence, {}).get("state") == "late":
        return f"Rank {rank} came to it when the others had given up."
    last = f"Its last call there was {before[-1]['text']}. " if before else f"It made no call on {label}. "
    frames = record["stacks"].get("main", [])
    # The innermost frame of the user's code.
    own = [frame for frame in frames if not any(f"/{package}/" in frame for package in ("bagua", "torch"))]
    return f"{last}When it wrote its record, rank {rank} stood at {(own or frames or ['an unknown place'])[-1]}."


def _silent(records: Mapping[int, Record]) -> Iterator[str]:
    known = set().union(*(one["ranks"] for one in records.values()))
    missing = sorted(known - set(records))
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        yield f"{_ranks(missing)} {verb} written no record: killed, stopped, or still busy with something else."


def _messages(records: Mapping[int, Record]) -> Iterator[str]:
    """Messages under way."""
    for rank, record in records.items():
        for call in record["calls"]:
            if call["kind"] in _MESSAGES and call["state"] in ("started", "failed"):
                yield f"Rank {rank} was in a message on {call['label']}: {call['text']}."


def _ranks(ranks: Sequence[int]) -> str:
    """``Rank 1``, ``Ranks 0 and 2``; many ranks in short."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > len(shown):
        return f"Ranks {', '.join(shown)} and {len(ranks) - len(shown)} more"
    return f"Ranks {', '.join(shown[:-1])} and {shown[-1]}"
