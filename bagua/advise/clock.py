"""Time that belongs to a thread: without the seconds in which it was ready, and other threads had its core.

What else goes on in a machine, ranks measured beside each other included, is then no part of what is measured. Linux
says how long each thread has stood in the queue of a core; elsewhere nothing is taken off.
"""

from __future__ import annotations

import os
import threading
import time

_FILE = "/proc/thread-self/schedstat"
_LONGEST_BYTES = 128


class _Statistics:
    """The file in which Linux writes what a core has done for the thread that opens it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        try:
            self._descriptor = os.open(_FILE, os.O_RDONLY)
        except OSError:
            self._descriptor = -1

    def read(self) -> tuple[float, float]:
        """Seconds on a core, and seconds in its queue; zeros where the system does not count."""
        if self._descriptor < 0:
            return 0.0, 0.0
        numbers = os.pread(self._descriptor, _LONGEST_BYTES, 0).split()
        return (int(numbers[0]) * 1e-9, int(numbers[1]) * 1e-9) if len(numbers) > 1 else (0.0, 0.0)

    @property
    def of_parent(self) -> bool:
        """Whether this process was forked since, so that the file is that of another thread."""
        return os.getpid() != self._process

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


class _Own(threading.local):
    """The statistics of the calling thread."""

    def __init__(self) -> None:
        self.statistics = _Statistics()

    def read(self) -> tuple[float, float]:
        """See ``_Statistics``."""
        if self.statistics.of_parent:
            self.statistics = _Statistics()
        return self.statistics.read()


_own = _Own()


def queued_s() -> float:
    """Seconds for which the calling thread was ready to go on and had no core, since it began."""
    return _own.read()[1]


def own_time() -> float:
    """A clock that stands while the calling thread has no core. Only differences within one thread have a meaning."""
    return time.perf_counter() - queued_s()


def sees_queues() -> bool:
    """Whether this system says how long threads stand in a queue."""
    return _own.read()[0] > 0.0
