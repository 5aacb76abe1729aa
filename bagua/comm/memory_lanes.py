"""Background threads of one rank: calls of one lane run in order, lanes do not wait for each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

from bagua.comm.background import BackgroundThread
from bagua.comm.memory_line import Deadline
from bagua.comm.transport import Handle
from bagua.errors import CollectiveTimeoutError

__all__ = ["COLLECTIVE", "Lane", "Lanes", "Pending"]

#: ``COLLECTIVE``, ("send", to whom) or ("recv", from whom).
Lane = tuple[str, int]
COLLECTIVE: Lane = ("collective", -1)


class Lanes:
    """The lanes of one rank; a thread starts with the first call that needs it.

    Messages have lanes of their own, so that ``send`` and ``recv`` that both ranks
    start with ``async_op`` in the same order do not wait for each other for ever.

    Args:
        name: of the threads, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[Lane, BackgroundThread] = {}
        self._latest: dict[Lane, Future[None]] = {}
        self._stopped = False

    def idle(self, *lanes: Lane) -> bool:
        """Whether all calls of these lanes are complete."""
        for lane in lanes:
            latest = self._latest.get(lane)
            if latest is not None and not latest.done():
                return False
        return True

    def busy(self) -> bool:
        """Whether a call of any lane is not complete."""
        return any(not latest.done() for latest in list(self._latest.values()))

    def submit(self, lane: Lane, task: Callable[[], None]) -> Future[None]:
        """Run ``task`` when the earlier calls of its lane are complete.

        Raises:
            RuntimeError: the lanes were stopped.
        """
        thread = self._threads.get(lane)
        if thread is None:
            thread = self._threads[lane] = BackgroundThread(f"{self._name}-{lane[0]}")
        if self._stopped:  # ``stop`` may have come before the thread was there, out of a signal handler.
            raise RuntimeError(f"the lanes of {self._name} were stopped")
        future = self._latest[lane] = thread.submit(task)
        return future

    def stop(self, timeout_s: float) -> bool:
        """Finish what was submitted, end the threads, and say whether they ended in time."""
        self._stopped = True
        until = time.perf_counter() + timeout_s
        ended = True
        for thread in list(self._threads.values()):
            ended &= thread.stop(max(until - time.perf_counter(), 0.0))
        return ended


class Pending(Handle):
    """A call that runs in one lane, or ``sendrecv`` in two.

    Args:
        futures: its parts.
        deadline: of the call.
        abandoned: told why, when a wait is given up.
    """

    __slots__ = ("_abandoned", "_deadline", "_futures")

    def __init__(self, futures: Sequence[Future[None]], deadline: Deadline, abandoned: Callable[[str], None]) -> None:
        self._futures = futures
        self._deadline = deadline
        self._abandoned = abandoned

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all parts are complete; see ``Handle.wait``."""
        # At its own deadline the lane raises an error that knows more: let it.
        remaining = self._deadline.at - time.perf_counter() + 0.2
        allowed = remaining if timeout_s is None else min(timeout_s, remaining)
        complete, _ = wait(self._futures, max(allowed, 0.0), return_when="FIRST_EXCEPTION")
        for future in complete:
            future.result()
        if len(complete) < len(self._futures):
            timeout_s = self._deadline.timeout_s if timeout_s is None else timeout_s
            self._abandoned(f"a wait of {timeout_s} seconds passed")
            raise CollectiveTimeoutError("the call did not complete in time", timeout_s=timeout_s)

    def is_completed(self) -> bool:
        """Whether all parts are complete."""
        return all(future.done() for future in self._futures)

    def notify(self, callback: Callable[[], None]) -> bool:
        """Run ``callback`` in the lane whose part is the last to complete."""
        completed = itertools.count(1)

        def one_more(_: Future[None]) -> None:
            if next(completed) == len(self._futures):  # counting is atomic
                callback()

        for future in self._futures:
            future.add_done_callback(one_more)
        return True
