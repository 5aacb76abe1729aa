"""The thread that watches works on CUDA streams, which no host thread waits for.

One thread per process, alive while something is outstanding. It ends a communicator
at the deadline of a call, or when a notice of a peer says why that left; the error comes
out of the next call or ``wait`` on that communicator.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Protocol

from bagua.comm.lifetime.forks import family

_POLL_S = 0.02
_NOTICE_POLL_S = 0.5


class Watched(Protocol):
    """What the monitor sees of a started call."""

    def is_completed(self) -> bool:
        """Whether it is over. Must not raise."""

    def overdue(self) -> bool:
        """Whether its deadline has passed."""

    def end_overdue(self) -> None:
        """Break its communicator because of the deadline."""

    def end_if_peers_left(self) -> bool:
        """Break its communicator if a peer sent a notice, and say so. May take a moment."""


class Monitor:
    """Watches started calls until they are complete.

    Args:
        poll_s: how often calls are looked at.
        notice_poll_s: how often notices of peers are looked for.
    """

    def __init__(self, poll_s: float = _POLL_S, notice_poll_s: float = _NOTICE_POLL_S) -> None:
        self._poll_s = poll_s
        self._notice_poll_s = notice_poll_s
        self._watched: list[Watched] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        family.add(self)

    def disown(self) -> None:
        """In a forked child, which has no such thread: its parent watches."""
        self._changed = threading.Condition()
        self._watched = []
        self._thread = None

    def watch(self, call: Watched) -> None:
        """Look after ``call`` until it is complete."""
        with self._changed:
            self._watched.append(call)
            if self._thread is None and not self._stopped:
                thread = threading.Thread(target=self._run, name="bagua-monitor", daemon=True)
                thread.start()  # It fails where there may be no more threads; the next call tries again.
                self._thread = thread
            self._changed.notify()

    def _run(self) -> None:
        asked = time.monotonic()
        while True:
            with self._changed:
                while not self._watched and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                calls = list(self._watched)
            ask = time.monotonic() - asked >= self._notice_poll_s
            done = {id(call) for call in calls if self._look_at(call, ask)}
            if ask:
                asked = time.monotonic()
            with self._changed:
                self._watched = [call for call in self._watched if id(call) not in done]
                self._changed.wait_for(lambda: self._stopped, self._poll_s)

    @staticmethod
    def _look_at(call: Watched, ask: bool) -> bool:
        """Whether ``call`` is over, also because it was ended here."""
        if call.is_completed():
            return True
        if call.overdue():
            call.end_overdue()
            return True
        return ask and call.end_if_peers_left()

    def stop(self) -> None:
        """End the thread; nothing is watched any more."""
        with self._changed:
            self._stopped = True
            self._watched.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)


#: The one of this process.
monitor = Monitor()
atexit.register(monitor.stop)
