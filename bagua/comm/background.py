"""A daemon thread that runs submitted functions in order, and is joined at interpreter exit.

The standard library's executors use non-daemon threads, which keep a process
alive when one of them is stuck in a collective.
"""

from __future__ import annotations

import atexit
import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["BackgroundThread"]

T = TypeVar("T")

_living: weakref.WeakSet[BackgroundThread] = weakref.WeakSet()


class BackgroundThread:
    """Runs functions one after the other in a thread that starts with the first of them.

    Args:
        name: of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: A signal handler that interrupts ``submit`` may call ``stop``.
        self._lock = threading.RLock()
        self._stopped = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` after everything submitted before it.

        It runs in a copy of the caller's context, so that a rank that is a thread
        finds its own default group there.

        Raises:
            RuntimeError: the thread was stopped.
        """
        future: Future[T] = Future()
        context = contextvars.copy_context()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(context.run(function))
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks the future
                future.set_exception(error)

        with self._lock:
            if self._stopped:
                raise RuntimeError(f"background thread {self._name} was stopped")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                thread.start()
                self._thread = thread  # Not earlier: who has not started cannot be waited for.
                _living.add(self)
            self._queue.put(task)
            if self._stopped and future.cancel():  # by a signal handler, meanwhile
                raise RuntimeError(f"background thread {self._name} was stopped")
        return future

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task

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


def _stop_all() -> None:
    for background in list(_living):
        background.stop(timeout_s=1.0)


atexit.register(_stop_all)
