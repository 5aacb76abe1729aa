"""What is known of all communicators of one rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from bagua.comm.records.recorder import LATEST_LENGTH, Recorder
from bagua.comm.records.statistics import KindStatistics, Statistics, merge


@dataclass
class Ledger:
    """What is known of all communicators that one rank ever made, closed ones included.

    Attributes:
        open: counters of those that are open.
        latest: counters of those that were closed last; a call that another thread makes may end a little later.
        closed: sums of the counters of all others.
        lost: global rank of the first peer that was lost, and what it did; None if none was.
        recorder: record of the calls of the rank.
    """

    open: list[Statistics] = field(default_factory=list)
    latest: list[Statistics] = field(default_factory=list)
    closed: dict[str, KindStatistics] = field(default_factory=dict)
    lost: tuple[int, str] | None = None
    guard: threading.RLock = field(default_factory=threading.RLock)
    recorder: Recorder = field(default_factory=Recorder)

    def retire(self, entry: Statistics) -> None:
        """Keep the sums of a communicator that was closed, and forget the rest."""
        with self.guard:
            if entry in self.open:
                self.open.remove(entry)
                self.latest.append(entry)
                if len(self.latest) > LATEST_LENGTH:
                    self.closed = merge([self.closed, self.latest.pop(0).snapshot()])
                self.recorder.retire(entry)

    def disown(self) -> None:
        """In a forked child: another thread of the parent may have held a lock."""
        self.guard = threading.RLock()
        self.recorder.disown()

    def totals(self) -> dict[str, KindStatistics]:
        """Sums over all communicators, by kind of call."""
        with self.guard:
            return merge([self.closed, *(entry.snapshot() for entry in (*self.latest, *self.open))])
