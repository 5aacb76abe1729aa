"""Daemon threads: one that runs submitted functions in order, and those that talk to a peer that may never answer.

The standard library's executors use non-daemon threads, which keep a process
alive when one of them is stuck in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from bagua.comm.lifetime.forks import family, forked_error

T = TypeVar("T")


def daemon(name: str, target: Callable[..., object], *arguments: object) -> threading.Thread:
    """A thread that runs ``target`` from now on, and ends with the process."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    thread.start()
    return thread  # Not earlier: who has not started cannot be waited for.


_living: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()
#: How long the end of the process waits for what runs beside it, in seconds.
_EXIT_S = 1.0


class _Task(Future[T]):
    """What was submitted; in a forked child no thread completes it."""

    def __init__(self) -> None:
        super().__init__()
        self._generation = family.generation

    def result(self, timeout: float | None = None) -> T:
        if self._generation != family.generation:
            raise forked_error()
        return super().result(timeout)


class BackgroundThread:
    """Runs functions one after the other in a thread that starts with the first of them.

    Args:
        name: name of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: A signal handler that interrupts ``submit`` may call ``stop``.
        self._lock = threading.RLock()
        self._stopped = False
        self._queued = self._ended = 0
        family.add(self)

    def disown(self) -> None:
        """In a forked child, which has no such thread: what was submitted runs in the parent only."""
        self._lock = threading.RLock()
        self._queue = queue.SimpleQueue()
        self._thread = None
        self._queued = self._ended = 0

    def idle(self) -> bool:
        """Whether everything that was submitted is over."""
        return self._ended >= self._queued

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` after everything submitted before it.

        It runs in a copy of the caller's context, so that a rank that is a thread
        finds its own default group there.

        Raises:
            RuntimeError: the thread was stopped.
        """
        future: Future[T] = _Task()
        context = contextvars.copy_context()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(function))
            except BaseException as error:  # noqa: BLE001 - raised by the thread that asks the future
                future.set_exception(error)

        self.put(task)
        if self._stopped and future.cancel():  # by a signal handler, meanwhile
            raise RuntimeError(f"background thread {self._name} was stopped")
        return future

    def put(self, task: Callable[[], None]) -> None:
        """Run ``task``, which raises nothing, after everything submitted before it.

        Raises:
            RuntimeError: the thread was stopped.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError(f"background thread {self._name} was stopped")
            if self._thread is None:
                self._thread = daemon(self._name, self._run)
                _living.add(self)
            self._queued += 1
            self._queue.put(task)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task
            self._ended += 1

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Let what was submitted finish, end the thread, and say whether it ended in time."""
        with self._lock:
            first = not self._stopped
            self._stopped = True
            thread = self._thread
            if first:
                self._queue.put(None)
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()


def within(limit_s: float, ask: Callable[[], T]) -> T:
    """What ``ask`` returns or raises, for somebody who has no thread to lose.

    A store whose host was stopped never answers, and its client cannot be interrupted.

    Args:
        limit_s: seconds that it may take.
        ask: called in another thread.

    Raises:
        TimeoutError: it takes longer, or no thread can start.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            outcome.set_exception(error)

    if not _beside.start(run) or not wait([outcome], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return outcome.result()


def bounded(function: Callable[[], T], limit_s: float) -> T | None:
    """The result of ``function``, or None if it fails or takes longer than ``limit_s``; see ``within``."""
    with contextlib.suppress(Exception):  # Nothing that a store can raise may hide the error that led here.
        return within(limit_s, function)
    return None


class _Beside:
    """What runs in threads of its own, beside its callers."""

    def __init__(self) -> None:
        self._running: set[threading.Event] = set()
        family.add(self)

    def disown(self) -> None:
        """In a forked child nothing of it runs."""
        self._running = set()

    def start(self, function: Callable[[], None]) -> bool:
        """Run ``function`` beside what the caller does; False if no thread can start, and it will not run.

        The end of the process waits a little for it. A thread that comes back from torch into an interpreter that has
        ended takes the process down (SIGABRT).
        """
        running, ended = self._running, threading.Event()

        def run() -> None:
            try:
                function()
            finally:
                running.discard(ended)
                ended.set()

        running.add(ended)
        try:
            daemon("bagua-beside", run)
        except RuntimeError:
            running.discard(ended)
            return False
        return True

    def wait(self, limit_s: float) -> None:
        """Wait until nothing runs, for at most ``limit_s``."""
        until = time.monotonic() + limit_s
        for ended in list(self._running):
            ended.wait(max(0.0, until - time.monotonic()))


_beside = _Beside()
beside = _beside.start


def _stop_all() -> None:
    for background in list(_living):
        background.stop(timeout_s=_EXIT_S)
    _beside.wait(_EXIT_S)


atexit.register(_stop_all)
