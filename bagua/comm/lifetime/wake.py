"""Waking one thread from anywhere."""

from __future__ import annotations

import contextlib
import threading


class Wake:
    """Tells one thread to look.

    ``set`` waits for no lock: a finalizer or a signal handler may call it in the thread that looks. This is not
    ``SimpleQueue.get(timeout=...)`` of the standard library, which never returns if the time is up when it looks
    a second time (CPython up to 3.12 takes the negative rest for "no limit").
    """

    def __init__(self) -> None:
        self._asleep = threading.Lock()
        self._asleep.acquire()

    def set(self) -> None:
        """End the wait that is under way, or the next one."""
        with contextlib.suppress(RuntimeError):  # It was set already.
            self._asleep.release()

    def wait(self, limit_s: float | None = None) -> None:
        """Sleep until ``set`` was called since the last wait.

        Args:
            limit_s: at most so many seconds; None for no limit.
        """
        self._asleep.acquire(timeout=-1 if limit_s is None else min(max(limit_s, 0.0), threading.TIMEOUT_MAX))
