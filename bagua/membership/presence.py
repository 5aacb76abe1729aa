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
from bagua.membership.island import Island
from bagua.membership.roster import Deadlines, Roster, SeatRecord, record_name, seat_name

_log = logging.getLogger("bagua")
#: Looks in the place of one while somebody comes in: all stop for it, and who sees it late keeps the others waiting.
_HURRY = 5


def take_seat(cells: Cells) -> int:
    """A number that no other island ever has."""
    name = uuid.uuid4().hex
    return next(seat for seat in itertools.count() if cells.claim(seat_name(seat), name) == name)


class Presence:
    """Says how this process is as long as it lives, and looks at the others.

    Args:
        cells: cells of the store.
        seat: seat of its island; see ``take_seat``.
        island: its ranks.
        deadlines: how often.
        clock: seconds.

    Attributes:
        roster: all islands, as this process has seen them last.
        ranks: ranks of its own island, likewise.
        trouble: why the store could not be asked lately; empty if it could.
    """

    def __init__(
        self, cells: Cells, seat: int, island: Island, deadlines: Deadlines, clock: Callable[[], float]
    ) -> None:
        self._cells = cells
        self._island = island
        self._deadlines = deadlines
        self._clock = clock
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._goodbye = False
        self._thread: threading.Thread | None = None
        self._forked = False
        self.trouble = ""
        self.seat = seat
        self.roster = Roster(cells, seat if island.leads else None, deadlines)
        self.ranks = Roster(cells, island.rank, deadlines, (seat, island.size))
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
            self._cells.post(record_name(self.seat, self._island.rank), self._record.to_json())

    def note(self, **news: Any) -> None:
        """Say it with the next sign of life.

        Args:
            news: fields of the record.
        """
        with self._lock:
            self._record = dataclasses.replace(self._record, **news)

    def look(self) -> None:
        """See how the others are, if the store answers."""
        with self._lock, self._noting():
            now = self._clock()
            self.roster.look(now)
            if self._island.size > 1:
                self.ranks.look(now)

    def lost_ranks(self) -> dict[int, str]:
        """Why this island is at its end, by rank of those who are silent. Who said goodbye is not missed."""
        left = self.ranks.left()
        return {rank: why for rank, why in self.ranks.gone(-1).items() if rank not in left}

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
        """Give signs of life from now on, and have ``watch`` called after each look at the others.

        Raises:
            RuntimeError: no thread can start; the others know that this process has left.
        """

        def live() -> None:
            while not self._ended.wait(self._deadlines.beat_s / (_HURRY if self.roster.is_coming() else 1)):
                try:
                    self.tell()
                    self.look()
                    watch()
                except Exception as error:  # noqa: BLE001 - who gives no sign of life is expelled: go on
                    self.trouble = f"signs of life fail: {error!r}"
                    _log.exception("islands: seat %d cannot say that it is alive", self.seat)

        thread = threading.Thread(target=live, name="bagua-islands", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.leave("its process can start no thread")  # Others would take it for alive until it is silent for long.
            raise
        self._thread = thread

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
