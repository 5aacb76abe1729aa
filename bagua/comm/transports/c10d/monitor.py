"""The thread that watches works on CUDA streams, which no host thread waits for.

One thread per process, alive while something is outstanding. It ends a communicator
at the deadline of a call, or when a notice of a peer says why that left; the error comes
out of the next call or ``wait`` on that communicator.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any

from bagua.comm.call import Call
from bagua.comm.lifetime.background import daemon
from bagua.comm.lifetime.forks import family
from bagua.comm.transports.failure.finder import FailureFinder
from bagua.errors import CommunicationError

_POLL_S = 0.02
_NOTICE_POLL_S = 0.5


def all_completed(works: tuple[Any, ...]) -> bool:
    """Whether the device is done with all of ``works``, or one of them has failed: waiting raises that."""
    try:
        return all(work.is_completed() for work in works)
    except RuntimeError:
        return True


class StreamWatch:
    """What the monitor watches of a started call: its works themselves, for the host does not wait for their end.

    Args:
        failures: knowledge of the failures of the communicator.
        works: torch's works of the call.
        timeout_s: deadline of the call, from now.
        call: the call, which its error names, although a later one raises it.
    """

    def __init__(
        self, failures: FailureFinder, works: tuple[Any, ...], timeout_s: float, call: Call | None = None
    ) -> None:
        self._failures = failures
        self._call = call
        self._works = works
        self._timeout_s = timeout_s
        self._started = time.monotonic()

    def is_over(self, ask: bool) -> bool:
        """Whether nothing is left to watch: the device is done, or the communicator is broken, perhaps here and now.

        Args:
            ask: look for a notice of a peer, too, which may take a moment.
        """
        failures = self._failures
        if failures.broken or all_completed(self._works):
            return True
        if self._elapsed_s() >= self._timeout_s:
            failures.end_unattended(lambda: self._of_call(failures.timed_out(self._elapsed_s(), self._timeout_s)))
            return True
        if ask and failures.peers_left():
            left = ConnectionError("a peer left")
            failures.end_unattended(lambda: self._of_call(failures.failed(left, self._elapsed_s(), self._timeout_s)))
            return True
        return False

    def _of_call(self, error: CommunicationError) -> CommunicationError:
        if self._call is not None:
            error.call, error.sequence = str(self._call), self._call.sequence
        return error

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


class Monitor:
    """Watches started calls until they are complete.

    Args:
        poll_s: how often calls are looked at.
        notice_poll_s: how often notices of peers are looked for.
    """

    def __init__(self, poll_s: float = _POLL_S, notice_poll_s: float = _NOTICE_POLL_S) -> None:
        self._poll_s = poll_s
        self._notice_poll_s = notice_poll_s
        self._watched: list[StreamWatch] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        family.add(self)

    def disown(self) -> None:
        """In a forked child, which has no such thread: its parent watches."""
        self._changed = threading.Condition()
        self._watched = []
        self._thread = None

    def watch(self, call: StreamWatch) -> None:
        """Look after ``call`` until it is complete."""
        with self._changed:
            self._watched.append(call)
            if self._thread is None and not self._stopped:
                # It fails where there may be no more threads; the next call tries again.
                self._thread = daemon("bagua-monitor", self._run)
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
            done = {id(call) for call in calls if call.is_over(ask)}
            if ask:
                asked = time.monotonic()
            with self._changed:
                self._watched = [call for call in self._watched if id(call) not in done]
                self._changed.wait_for(lambda: self._stopped, self._poll_s)

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
