"""Handles of calls that were started with ``async_op=True``."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.operands import as_seconds
from bagua.errors import CollectiveTimeoutError, CommunicationError, ConcurrentUseError

__all__ = ["CompositeWork", "JoinedWork", "PendingWork", "Steps", "Work"]

#: A collective made of others: yields each started work, returns the result.
Steps = Generator["Work", None, Any]


class Work(ABC):
    """An unfinished call. Every rank must ``wait`` before it uses the tensors.

    Example:
        >>> import torch, bagua.comm
        >>> group = bagua.comm.solo_group()
        >>> work = group.global_communicator.allreduce(torch.ones(2), async_op=True)
        >>> work.wait(), work.is_completed(), work.exception()
        (True, True, None)
    """

    def __init__(self) -> None:
        self._waiting = threading.RLock()
        self._finished = False
        self._error: BaseException | None = None
        self._result: Any = None
        self._generation = family.generation

    def _inherited(self) -> bool:
        """Whether this process was forked after the call was started: the call is the parent's then."""
        return self._generation != family.generation

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until the call is complete, on CUDA until the current stream will see it.

        Args:
            timeout: at most so many seconds; None means the deadline of the call.

        Returns:
            True.

        Raises:
            CommunicationError: the call failed. Also a ``timeout`` that passes breaks the
                communicator, because the ranks no longer agree on what has happened.
        """
        if self._inherited() and not self._finished:
            raise forked_error()
        if timeout is None:
            with self._waiting:
                self._finish_waiting(None)
        else:
            self._wait_at_most(as_seconds(timeout))
        return True

    def _wait_at_most(self, timeout_s: float) -> None:
        left_s = timeout_s
        if not self._waiting.acquire(blocking=False):
            until = time.monotonic() + timeout_s
            while not self._waiting.acquire(timeout=max(left_s, 0.01)):
                error = self._give_up(timeout_s)
                if error is not None:
                    raise error
                left_s = until - time.monotonic()
            left_s = max(until - time.monotonic(), 0.001)
        try:
            self._finish_waiting(left_s)
        finally:
            self._waiting.release()

    def _finish_waiting(self, timeout_s: float | None) -> None:
        """Complete the call unless that has happened; ``_waiting`` is held."""
        if not self._finished:
            try:
                self._result = self._complete(timeout_s)
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._finished = True
        elif self._error is not None:
            raise self._error

    def _give_up(self, timeout_s: float) -> CommunicationError | None:
        """End the call, for which another thread waits, because this one's time is over.

        Returns:
            The error to raise; None if the call has just completed.
        """
        return CollectiveTimeoutError("the call did not complete in time", timeout_s=timeout_s)

    @abstractmethod
    def _complete(self, timeout_s: float | None) -> Any:
        """Wait, finish the work in the waiting thread, and return the result."""

    @abstractmethod
    def _poll(self) -> bool:
        """Whether ``_complete`` would return or raise at once. Never blocks, never raises."""

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._finished or self._inherited() or self._poll()

    def exception(self) -> BaseException | None:
        """The error that ``wait`` raises, or None; does not wait for an unfinished call."""
        if not self._finished and self.is_completed():
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001 - handed to the caller
                return error
        return self._error

    def result(self) -> Any:
        """Wait, then the tensor, list of tensors or object that the call produced."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``, completed by the thread that completes the call, else by one that waits for it."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            try:
                future.set_result(self.result())
            except Exception as error:  # noqa: BLE001 - handed to the future
                future.set_exception(error)

        self.when_completed(complete)
        return future

    def when_completed(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` run, in any thread, as soon as ``wait`` would return or raise at once, or soon after.

        Args:
            callback: runs once, and raises nothing.
        """
        if self._inherited():
            callback()
        elif not self.notify(callback):

            def after_waiting() -> None:
                with contextlib.suppress(Exception):  # It is kept, and raised by ``wait``.
                    self.wait()
                callback()

            threading.Thread(target=after_waiting, name="bagua-future", daemon=True).start()

    def notify(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002  # of those who can tell
        """See ``Handle.notify``."""
        return False


class PendingWork(Work):
    """One started call of a transport.

    Args:
        complete: waits for it, at most the given seconds, and returns the result.
        poll: function that says whether it is complete.
        notify: see ``Handle.notify``.
        give_up: breaks the communicator because of the given error.
    """

    def __init__(
        self,
        complete: Callable[[float | None], Any],
        poll: Callable[[], bool],
        notify: Callable[[Callable[[], None]], bool] | None = None,
        give_up: Callable[[CommunicationError], None] | None = None,
    ) -> None:
        super().__init__()
        self._complete_call = complete
        self._poll_call = poll
        self._notify_call = notify
        self._give_up_call = give_up

    def _give_up(self, timeout_s: float) -> CommunicationError | None:
        if self._poll_call():
            return None
        error = super()._give_up(timeout_s)
        if error is not None and self._give_up_call is not None:
            self._give_up_call(error)
        return error

    def _complete(self, timeout_s: float | None) -> Any:
        return self._complete_call(timeout_s)

    def _poll(self) -> bool:
        return self._poll_call()

    def notify(self, callback: Callable[[], None]) -> bool:
        """See ``Handle.notify``."""
        return self._notify_call is not None and self._notify_call(callback)


def _countdown(timeout_s: float | None) -> Callable[[], float | None]:
    """A function that says how much of ``timeout_s`` is left for the next of several waits."""
    if timeout_s is None:
        return lambda: None
    until = time.monotonic() + timeout_s
    return lambda: max(until - time.monotonic(), 0.001)


class JoinedWork(Work):
    """Several works that were started together, complete when all are.

    Args:
        works: none depends on another.
        finish: brings the results to where they belong, once.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], None] | None) -> None:
        super().__init__()
        self._works = works
        self._finish = finish

    def _give_up(self, timeout_s: float) -> CommunicationError | None:
        errors = (work._give_up(timeout_s) for work in self._works)  # noqa: SLF001 - of another work
        return next((error for error in errors if error is not None), None)

    def _complete(self, timeout_s: float | None) -> None:
        left_s = _countdown(timeout_s)
        for work in self._works:
            work.wait(left_s())
        if self._finish is not None:
            self._finish()

    def _poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def notify(self, callback: Callable[[], None]) -> bool:
        """See ``Handle.notify``; if one of the works cannot tell, ``callback`` never runs."""
        completed = itertools.count(1)

        def one_more() -> None:
            if next(completed) == len(self._works):
                callback()

        return all(work.notify(one_more) for work in self._works)


class CompositeWork(Work):
    """A collective made of several, advanced by the thread that waits for it.

    Creating one starts its first step. A later call on the same communicator first
    finishes it, so all ranks issue the steps in one order.

    The steps are advanced only by the thread that holds ``_waiting``, and only past a work that
    is complete: several threads may wait and poll, ``get_future`` starts one of them, and a
    signal handler may do so in the middle of it.

    Args:
        steps: yields each started work and returns the result.
        released: called once, when no step is left.
    """

    def __init__(self, steps: Steps, released: Callable[[CompositeWork], None]) -> None:
        super().__init__()
        self._steps = steps
        self._released: Callable[[CompositeWork], None] | None = released
        self._driver: int | None = None
        self._current: Work | None = None
        try:
            self._advance(None)
        except BaseException:
            self._end()
            raise

    def driven_here(self) -> bool:
        """Whether the calling thread is the one that advances the steps right now."""
        return self._driver == threading.get_ident()

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until all steps are complete; see ``Work.wait``.

        Raises:
            ConcurrentUseError: a signal handler that interrupted a step waits for the whole.
        """
        if self.driven_here():
            raise ConcurrentUseError(
                "a signal handler waits for the call that it interrupted",
                advice="Ask is_completed() there, and wait after the handler has returned.",
            )
        return super().wait(timeout)

    def _advance(self, complete: Work | None) -> None:
        """Take the next step, unless a signal handler has done so since ``complete`` was looked up."""
        self._driver = threading.get_ident()  # Before looking: from here on handlers do not advance.
        try:
            if self._current is complete and not self._finished:
                self._current = next(self._steps)
        except StopIteration as end:
            self._result = end.value
            self._current = None
            self._end()
        finally:
            self._driver = None

    def _end(self) -> None:
        """No step is left; a communicator may have begun another composite work since it was told so."""
        self._steps.close()
        released, self._released = self._released, None
        if released is not None:
            released(self)

    def _give_up(self, timeout_s: float) -> CommunicationError | None:
        current = self._current
        return None if current is None else current._give_up(timeout_s)  # noqa: SLF001 - of another work

    def _complete(self, timeout_s: float | None) -> Any:
        left_s = _countdown(timeout_s)
        try:
            while not self._finished and (current := self._current) is not None:
                current.wait(left_s())
                self._advance(current)
        except BaseException:
            self._end()
            raise
        if self._error is not None:  # met by a signal handler that polled meanwhile
            raise self._error
        return self._result

    def _poll(self) -> bool:
        if self.driven_here() or not self._waiting.acquire(blocking=False):
            return self._finished  # The thread that is at it will say so.
        try:
            while not self._finished and (current := self._current) is not None:
                if not current.is_completed():
                    return False
                current.wait()
                self._advance(current)
        except BaseException as error:
            self._end()
            self._error, self._finished = error, True  # raised by wait
            if not isinstance(error, Exception):
                raise
        finally:
            self._waiting.release()
        return True
