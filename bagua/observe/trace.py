"""What one rank does and when, line by line into a file; ``timeline`` puts the files of all ranks together."""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections import deque
from typing import Any

from bagua.comm import CallRecord, Place, Recorder
from bagua.observe.folders import NO_LINK, not_writable, usable_folder, write_whole

TRACE_PREFIX = "trace_rank_"
#: Lines of one rank, at most: about 50 MB.
MOST_LINES = 250_000
#: Lines that wait in memory, and for how many seconds at most: a process may be killed.
_BATCH, _PAUSE_S = 512, 2.0
_log = logging.getLogger("bagua")


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
