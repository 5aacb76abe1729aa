"""This process among the others: its seat, its signs of life, and what it sees."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from bagua.comm import Cells, family, forked_error
from bagua.errors import StoreLostError
from bagua.membership.roster import Deadlines, Roster, SeatRecord, record_name, seat_name

__all__ = ["Presence"]

_log = logging.getLogger("bagua")


class Presence:
    """Takes a seat, says how this process is as long as it lives, and looks at the others.

    Args:
        cells: cells of the store.
        deadlines: how often.
        clock: seconds.

    Attributes:
        seat: a number that no other process ever has.
        roster: everybody, as this process has seen them last.
        trouble: why the store could not be asked lately; empty if it could.
    """

    def __init__(self, cells: Cells, deadlines: Deadlines, clock: Callable[[], float]) -> None:
        self._cells = cells
        self._deadlines = deadlines
        self._clock = clock
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._goodbye = False
        self._thread: threading.Thread | None = None
        self._forked = False
        self.trouble = ""
        name = uuid.uuid4().hex
        self.seat = next(seat for seat in itertools.count() if cells.claim(seat_name(seat), name) == name)
        self.roster = Roster(cells, self.seat, deadlines)
        self._record = SeatRecord(host=f"{socket.gethostname()}, process {os.getpid()}")
        self.tell()
        self.look()
        family.add(self)

    def tell(self, **news: Any) -> None:
        """Say how this process is. What the store does not take now is said again with the next sign of life.

        Args:
            news: fields of the record.
        """
        if self._forked:
            raise forked_error()
        with self._lock, self._noting():
            self._record = dataclasses.replace(self._record, beat=self._record.beat + 1, **news)
            self._cells.post(record_name(self.seat), self._record.to_json())

    def look(self) -> None:
        """See how the others are, if the store answers."""
        with self._lock, self._noting():
            self.roster.look(self._clock())

    @property
    def has_left(self) -> bool:
        """Whether this process has said goodbye."""
        return self._goodbye

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
            self.trouble = ""
        except StoreLostError as error:
            self.trouble = error.problem

    def start(self, watch: Callable[[], None]) -> None:
        """Give signs of life from now on, and have ``watch`` called after each look at the others."""

        def live() -> None:
            while not self._ended.wait(self._deadlines.beat_s):
                try:
                    self.tell()
                    self.look()
                    watch()
                except Exception as error:  # noqa: BLE001 - who gives no sign of life is expelled: go on
                    self.trouble = f"signs of life fail: {error!r}"
                    _log.exception("islands: seat %d cannot say that it is alive", self.seat)

        self._thread = threading.Thread(target=live, name="bagua-islands", daemon=True)
        self._thread.start()

    def leave(self, reason: str) -> None:
        """Say goodbye, and give no more signs of life. Idempotent."""
        if self._forked or self._ended.is_set():
            return
        self._goodbye = True
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._deadlines.silence_s)
        self.tell(left=reason, waiting=False)

    def disown(self) -> None:
        """In a forked child: the seat is the parent's."""
        self._forked = True
        self._lock = threading.RLock()
