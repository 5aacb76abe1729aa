"""The watch on one rank, which posts beats and owns trace and flight record; and the metrics that come of it."""

from __future__ import annotations

import contextlib
import csv
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bagua import env
from bagua.comm import Beats, Place, Recorder, get_default_group, observers
from bagua.observe.flight import FlightRecord
from bagua.observe.straggler import Reading, latest_rank
from bagua.observe.timeline import TraceFile

#: Seconds between two beats, and after how many a rank counts as silent.
BEAT_S, SILENT_S = 1.0, 10.0
#: Up to so many ranks read what all others say.
MOST_READERS = 32
#: Readings from the oldest to the latest that count as lately.
_READINGS = 16


class RankWatch:
    """What is kept of one rank.

    Args:
        recorder: recorder of the rank.
        place: place of this rank among all.
        beats: beats that ranks publish about themselves.

    Attributes:
        others: the last beats of the other ranks that were read.
        readings: seconds that this rank had waited at the latest moments, oldest first.
    """

    def __init__(self, recorder: Recorder, place: Place, beats: Beats) -> None:
        self._recorder = weakref.ref(recorder)
        self.place = place
        self._beats = beats
        self._job = recorder.job
        self._began = recorder.clock()
        self._process = os.getpid()
        self.others: dict[int, dict[str, Any]] = {}
        self.readings = deque([Reading.of(recorder)], maxlen=_READINGS)
        #: When each other rank gave its last sign of life, and how long this one paused between its last two.
        self._heard: dict[int, float] = {}
        self._pause_s = BEAT_S
        self.flight = FlightRecord(recorder, place, folder) if (folder := env.flight_dir()) else None
        self._trace = recorder.trace = TraceFile(recorder, place, where) if (where := env.trace_dir()) else None
        if len(place.ranks) > 1:
            recorder.beat = self._beat
            recorder.beat_at = self._began + BEAT_S

    def _beat(self) -> None:
        """Post a beat, and read those of the others, both beside what the caller does. Raises nothing."""
        recorder = self._recorder()
        if recorder is not None and os.getpid() == self._process:  # A forked child has its parent's connection.
            with contextlib.suppress(Exception):  # No beat is worth a step.
                now = Reading.of(recorder)
                self._pause_s = now.at - recorder.beat_at + BEAT_S
                recorder.beat_at = now.at + BEAT_S
                recent = now.since(self.readings[0])
                self.readings.append(now)
                self._beats.post(self._said(recorder, recent), self._read)

    def _read(self) -> None:
        """In the thread that has posted. Of many ranks only the first one reads, so that the store has little to do."""
        if self.place.rank > 0 and len(self.place.ranks) > MOST_READERS:
            return
        recorder = self._recorder()
        own, size = self.place.rank, len(self.place.ranks)
        # An earlier job of the same store has left its own, and may have had more ranks.
        others = {
            rank: beat
            for rank, beat in self._beats.read().items()
            if rank != own and rank < size and beat.get("job") == self._job
        }
        for rank, beat in others.items():
            if recorder is not None and self.others.get(rank, {}).get("at") != beat["at"]:
                self._heard[rank] = recorder.clock()
        self.others = others

    def _said(self, recorder: Recorder, recent: Reading) -> dict[str, Any]:
        times = recorder.times()
        records = [entry.recent[-1] for entry in recorder.open if entry.recent]
        last = max(records, key=lambda record: record.number, default=None)
        return {
            "world_size": len(self.place.ranks),
            "job": self._job,
            "at": time.time(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "backend": self.place.backend,
            "window_s": recent.at,
            "waits": recent.waits,
            "lasts": recent.lasts,
            "collectives_s": recent.collectives_s,
            "running_s": recorder.clock() - self._began,
            "time_s": times.time_s,
            "exposed_s": times.exposed_s,
            "waiting_s": times.waiting_s,
            "sent_bytes": recorder.sent_bytes(),
            "steps": recorder.steps,
            "call": "" if last is None else f"{last.place.label} {last.call}",
            "gauges": dict(recorder.gauges),
        }

    def alive(self, now: float) -> int:
        """How many ranks have given a sign of life lately, as far as this one knows; all of them before the first."""
        recorder = self._recorder()
        # Beats come with calls: who makes none cannot tell who is silent.
        since_beat_s = 0.0 if recorder is None else now - (recorder.beat_at - BEAT_S)
        patience_s = max(SILENT_S, 3 * self._pause_s, since_beat_s + SILENT_S)
        return len(self.place.ranks) - sum(now - heard > patience_s for heard in list(self._heard.values()))

    def end(self) -> None:
        """The rank ends."""
        recorder = self._recorder()
        if recorder is not None:
            recorder.beat_at, recorder.trace = float("inf"), None
        if self._trace is not None:
            self._trace.close()
        if self.flight is not None:
            self.flight.close()


class _Watches:
    """One watch for each rank of this process."""

    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Recorder, RankWatch] = weakref.WeakKeyDictionary()
        #: Of groups that no user initialized: those of torch's backend ``bagua``, and between islands.
        self._flights: weakref.WeakKeyDictionary[Recorder, FlightRecord] = weakref.WeakKeyDictionary()

    def started(self, recorder: Recorder, place: Place, beats: Beats) -> None:
        """See ``Observer``."""
        self.of[recorder] = RankWatch(recorder, place, beats)

    def failed(self, recorder: Recorder, error: BaseException) -> None:
        """See ``Observer``."""
        with contextlib.suppress(Exception):
            watch, folder = self.of.get(recorder), env.flight_dir()
            flight = self._flights.get(recorder) if watch is None else watch.flight
            if flight is None and watch is None and folder is not None and recorder.open:
                flight = FlightRecord(recorder, recorder.open[0].place, folder, listens=False)
                flight = self._flights.setdefault(recorder, flight)
            if flight is not None:
                flight.fail(error)

    def ended(self, recorder: Recorder) -> None:
        """See ``Observer``."""
        watch = self.of.pop(recorder, None)
        if watch is not None:
            with contextlib.suppress(Exception):
                watch.end()


_watches = _Watches()
#: From the import of this module on, ranks that are initialized are watched.
observers.append(_watches)


def metrics() -> dict[str, float]:
    """What communication cost this rank since ``init_process_group``, and what it says about training.

    Local and cheap: nothing is sent, and no other rank has to call it. Seconds and bytes only grow; take differences
    for what a step costs.

    Returns:
        By name. ``comm/calls``: calls that ended. ``comm/bytes_sent``: bytes that this rank sent, at least.
        ``comm/time``: seconds in which calls were under way, which is the sum of the next three.
        ``comm/time_waiting``: peers had not come yet. ``comm/time_exposed``: all had come, and computing stood still.
        ``comm/time_hidden``: all had come, and computing went on. ``comm/overlap``: hidden part of the last two.
        ``comm/wait_on_rank/<r>``: seconds that this rank waited for global rank r, which came last.
        ``comm/straggler``: the rank that came last most often in the last seconds, or for which others waited longest;
        -1 if none stands out.
        ``comm/alive``, ``comm/epoch_members``, ``comm/contributed``: ranks that gave a sign of life, that belong to the
        job, and that took part in the last exchange; islands, if the model trains between islands.

    Raises:
        NotInitializedError: without ``init_process_group``.

    Example:
        >>> import torch, bagua.comm
        >>> bagua.comm.init_process_group()
        >>> bagua.comm.allreduce(torch.ones(4))
        >>> now = metrics()
        >>> now["comm/calls"], now["comm/bytes_sent"], now["comm/straggler"]
        (1.0, 0.0, -1.0)
        >>> bagua.comm.destroy_process_group()
    """
    group = get_default_group()
    recorder = group.recorder
    times, watch = recorder.times(), _watches.of.get(recorder)
    moving = times.exposed_s + times.hidden_s
    reading = Reading.of(recorder)
    lately = reading.since(Reading(recorder.began, {}, 0.0) if watch is None else watch.readings[0])
    told = {} if watch is None else {rank: Reading.told(beat) for rank, beat in watch.others.items()}
    found = {
        "comm/calls": float(times.calls),
        "comm/bytes_sent": float(recorder.sent_bytes()),
        "comm/time": times.time_s,
        "comm/time_waiting": times.waiting_s,
        "comm/time_exposed": times.exposed_s,
        "comm/time_hidden": times.hidden_s,
        "comm/overlap": times.hidden_s / moving if moving > 0 else 0.0,
        "comm/straggler": float(latest_rank({group.rank: lately, **told})),
        "comm/alive": float(group.size if watch is None else watch.alive(reading.at)),
        "comm/epoch_members": float(group.size),
        "comm/contributed": float(group.size),
    }
    found.update({f"comm/wait_on_rank/{rank}": seconds for rank, seconds in sorted(recorder.waits().items())})
    found.update(recorder.gauges)
    return found


#: Bytes in which the end of the last whole row is looked for at once.
_TAIL_BYTES = 4096


class CsvWriter:
    """One row for each call, in a file that spreadsheets read: step, name, value.

    Args:
        path: path of the file; rows are added to it, after the last whole one.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> writer = CsvWriter(path)
        >>> writer.write(1, {"comm/overlap": 0.5})
        >>> writer.close()
        >>> print(path.read_text().strip())
        step,name,value
        1,comm/overlap,0.5
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        _drop_half_a_row(self._path)
        self._file = self._path.open("a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._rows.writerow(["step", "name", "value"])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row for each value."""
        self._rows.writerows([step, name, value] for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def _drop_half_a_row(path: Path) -> None:
    """Cut off what a process was writing when it was killed, or the disk was full: a number that has lost digits."""
    with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
        end = begin = file.seek(0, os.SEEK_END)
        tail = b""
        while begin and b"\n" not in tail:
            begin = max(begin - _TAIL_BYTES, 0)
            file.seek(begin)
            tail = file.read(end - begin)
        if tail and not tail.endswith(b"\n"):
            file.truncate(begin + tail.rfind(b"\n") + 1)
