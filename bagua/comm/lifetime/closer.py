"""Closing what belongs to an object that no code holds any more.

A finalizer runs between any two instructions of any thread, also of one that holds a lock of
ours. So it does nothing but hand over what must be closed, without a lock, to a thread that waits
for it. That thread closes what is idle: a slower rank may still need what this one has sent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from bagua.comm.lifetime.background import daemon
from bagua.comm.lifetime.forks import family


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


_log = logging.getLogger("bagua")
#: How often what is not idle yet is looked at.
_POLL_S = 0.01
_FAREWELL_S = 1.0


class Closable(Protocol):
    """Something that holds threads, descriptors or memory until it is closed."""

    def idle(self) -> bool:
        """Whether nothing is under way. Never blocks, never raises."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class _Closer:
    """The one thread of this process that closes; it runs as long as there is an owner."""

    def __init__(self) -> None:
        self._begin()
        self._registered = False
        family.add(self)

    def _begin(self) -> None:
        #: What to close, and how many owners it had; appended to by finalizers.
        self._handed_over: deque[tuple[Closable, int]] = deque()
        self._wake = Wake()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._owners = 0
        #: Never held while a finalizer may need it.
        self._guard = threading.Lock()

    def watch(self, owner: object, belongings: Closable) -> Callable[[], None]:
        """Close ``belongings`` soon after ``owner`` is garbage, as soon as they are idle.

        Args:
            owner: an object that ``belongings`` do not keep alive.
            belongings: closed in a background thread.

        Returns:
            A function that has them closed before that, as soon as they are idle. It never blocks.
        """
        with self._guard:
            if self._thread is None:  # A finalizer could not start it.
                self._thread = daemon("bagua-closer", self._run)
            self._owners += 1
            if not self._registered:
                self._registered = True
                atexit.register(self.stop)
        # To these two, at which a forked child does not look: the parent closes what is the parent's.
        hand_over = partial(_hand_over, self._handed_over, self._wake, belongings)
        finalizer = weakref.finalize(owner, hand_over, 1)
        # Then the groups that they belong to are closed, and they with them.
        finalizer.atexit = False
        return partial(hand_over, 0)

    def _ended(self, owners: int) -> bool:
        """So many owners less; whether there is none left, and the thread ends."""
        with self._guard:
            self._owners -= owners
            if self._owners or not owners:
                return False
            self._thread = None
            return True

    def _run(self) -> None:
        waiting: list[tuple[Closable, int]] = []
        while True:
            self._wake.wait(_POLL_S if waiting else None)
            if self._stopping:
                return
            while self._handed_over:
                waiting.append(self._handed_over.popleft())
            expected = sum(owners for _, owners in waiting)
            waiting = [(one, owners) for one, owners in waiting if not _closed(one)]
            if self._ended(expected - sum(owners for _, owners in waiting)):
                return

    def stop(self) -> None:
        """End the thread. What it leaves is closed with the groups of this process."""
        thread = self._thread
        if thread is not None:
            self._stopping = True
            self._wake.set()
            thread.join(_FAREWELL_S)

    def disown(self) -> None:
        """In a forked child: the thread, and what it has to close, are the parent's."""
        self._begin()


def _hand_over(to: deque[tuple[Closable, int]], wake: Wake, belongings: Closable, owners: int) -> None:
    to.append((belongings, owners))
    wake.set()


def _closed(belongings: Closable) -> bool:
    """Close ``belongings`` if they are idle; whether they were."""
    try:
        if not belongings.idle():
            return False
    except Exception:  # noqa: BLE001 - no caller is there to raise it to
        _log.exception("looking at what belonged to a dropped model failed")
    try:
        belongings.close()
    except Exception:  # noqa: BLE001 - no caller is there to raise it to
        _log.exception("closing what belonged to a dropped model failed")
    return True


_closer = _Closer()
close_with = _closer.watch
