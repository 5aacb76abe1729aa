"""Handles of calls that were started with ``async_op=True``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.operands import as_seconds
from bagua.comm.transports.contract import Handle, Joined, countdown
from bagua.errors import CollectiveTimeoutError, CommunicationError, ConcurrentUseError


class Work(Handle):
    """An unfinished call. Every rank must ``wait`` before it uses the tensors.

    It is completed once, by the first thread that waits; others wait for that one, and get the same answer.

    Args:
        complete: waits for the call, at most the given seconds, and returns the result.
        poll: function that says whether ``complete`` would return or raise at once. Never blocks, never raises.
        notify: see ``Handle.notify``; None if the call cannot tell.
        give_up: ends the call because the time of a thread is over while another one waits, and returns the error to
            raise; None if it has just completed.
        waiting: lock that is held by the thread that completes the call; None for one of its own.

    Example:
        >>> import torch, bagua.comm
        >>> group = bagua.comm.solo_group()
        >>> work = group.global_communicator.allreduce(torch.ones(2), async_op=True)
        >>> work.wait(), work.is_completed(), work.exception()
        (True, True, None)
    """

    __slots__ = (
        *("__weakref__", "_complete", "_error", "_finished", "_generation"),
        *("_give_up", "_notify", "_poll", "_result", "_waiting"),
    )

    def __init__(
        self,
        complete: Callable[[float | None], Any],
        poll: Callable[[], bool],
        notify: Callable[[Callable[[], None]], bool] | None = None,
        give_up: Callable[[float], CommunicationError | None] | None = None,
        waiting: threading.RLock | None = None,
    ) -> None:
        self._complete = complete
        self._poll = poll
        self._notify = notify
        self._give_up = give_up
        self._waiting = waiting or threading.RLock()
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
            ConcurrentUseError: a signal handler waits for a call made of several, of which it interrupted a step.
        """
        if self._generation != family.generation and not self._finished:
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
                error = self.give_up(timeout_s)
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
                self._finished = True
            except BaseException as error:
                if isinstance(error, ConcurrentUseError) and not self._poll():
                    raise  # Of a signal handler that waits for what it interrupted: the call goes on.
                self._error, self._finished = error, True
                raise
        elif self._error is not None:
            raise self._error

    def give_up(self, timeout_s: float) -> CommunicationError | None:
        """End the call, for which another thread waits, because this one's time is over.

        Args:
            timeout_s: seconds that this thread has waited.

        Returns:
            The error to raise; None if the call has just completed.
        """
        if self._give_up is not None:
            return self._give_up(timeout_s)
        return (
            None if self._poll() else CollectiveTimeoutError("the call did not complete in time", timeout_s=timeout_s)
        )

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._finished or self._inherited() or self._poll()

    @property
    def failed(self) -> bool:
        """Whether ``wait`` raises an error that is known here."""
        return self._error is not None

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
        future, settle = future_of(self.result)
        self.when_completed(settle)
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

    def notify(self, callback: Callable[[], None]) -> bool:
        return self._notify is not None and self._notify(callback)


def joined(works: Sequence[Work], finish: Callable[[], Any] | None) -> Work:
    """Several works that were started together as one, complete when all are.

    Args:
        works: none depends on another.
        finish: brings the results to where they belong, once, and returns that of the whole.
    """
    together = Joined(*works)

    def complete(timeout_s: float | None) -> Any:
        together.wait(timeout_s)
        return None if finish is None else finish()

    def give_up(timeout_s: float) -> CommunicationError | None:
        errors = (work.give_up(timeout_s) for work in works)
        return next((error for error in errors if error is not None), None)

    return Work(complete, together.is_completed, together.notify, give_up)


def future_of(outcome: Callable[[], Any]) -> tuple[torch.futures.Future[Any], Callable[[], None]]:
    """A future of torch, and what completes it with what ``outcome`` returns or raises."""
    future: torch.futures.Future[Any] = torch.futures.Future()

    def settle() -> None:
        try:
            future.set_result(outcome())
        except Exception as error:  # noqa: BLE001 - handed to those who wait
            future.set_exception(error)

    return future, settle


def followed(work: Work | None, finish: Callable[[], None]) -> Work | None:
    """Have ``finish`` bring the result to where it belongs, now or when ``work`` is complete."""
    if work is not None:
        return joined([work], finish)
    finish()
    return None


#: A collective made of others: yields each started work, returns the result.
Steps = Generator[Work, None, Any]


class Composite(Handle):
    """A collective made of several, advanced by the thread that waits for it.

    Creating one starts its first step. A later call on the same communicator first
    finishes it, so all ranks issue the steps in one order.

    The steps are advanced only by the thread that holds ``waiting``, and only past a work that
    is complete: several threads may wait and poll, ``get_future`` starts one of them, and a
    signal handler may do so in the middle of it.

    Args:
        steps: yields each started work and returns the result.
        released: called once, when no step is left.
        broke: called with the error that ended the steps early.

    Attributes:
        waiting: lock of the thread that advances the steps.
    """

    __slots__ = ("_broke", "_current", "_driver", "_error", "_over", "_released", "_result", "_steps", "waiting")

    def __init__(
        self,
        steps: Steps,
        released: Callable[[], None] | None = None,
        broke: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.waiting = threading.RLock()
        self._steps = steps
        self._released = released
        self._broke = broke
        self._driver: int | None = None
        self._current: Work | None = None
        self._over = False
        self._error: BaseException | None = None
        self._result: Any = None
        try:
            self._advance(None)
        except BaseException as error:
            self._fail(error)
            raise

    def as_work(self, finish: Callable[[Any], Any] | None = None) -> Work:
        """What the user of the collective gets: the result, or what ``finish`` makes of it."""

        def complete(timeout_s: float | None) -> Any:
            result = self.complete(timeout_s)
            return result if finish is None else finish(result)

        return Work(complete, self.is_completed, None, self._give_up, self.waiting)

    def driven_here(self) -> bool:
        """Whether the calling thread is the one that advances the steps right now."""
        return self._driver == threading.get_ident()

    def _advance(self, complete: Work | None) -> None:
        """Take the next step, unless a signal handler has done so since ``complete`` was looked up."""
        self._driver = threading.get_ident()  # Before looking: from here on handlers do not advance.
        try:
            if self._current is complete and not self._over:
                self._current = next(self._steps)
        except StopIteration as end:
            self._result = end.value
            self._current = None
            self._end()
        finally:
            self._driver = None

    def _end(self) -> None:
        """No step is left; a communicator may have begun another composite since it was told so."""
        self._over = True
        self._steps.close()
        released, self._released = self._released, None
        if released is not None:
            released()

    def _fail(self, error: BaseException) -> None:
        self._error = error  # raised by those who wait
        if self._broke is not None:
            self._broke(error)
        self._end()

    def _give_up(self, timeout_s: float) -> CommunicationError | None:
        current = self._current
        return None if current is None else current.give_up(timeout_s)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all steps are complete; see ``complete``."""
        with self.waiting:
            self.complete(timeout_s)

    def complete(self, timeout_s: float | None) -> Any:
        """Take all steps that are left, and return the result; ``waiting`` is held.

        Raises:
            ConcurrentUseError: a signal handler that interrupted a step waits for the whole.
        """
        if self.driven_here():
            raise ConcurrentUseError(
                "a signal handler waits for the call that it interrupted",
                advice="Ask is_completed() there, and wait after the handler has returned.",
            )
        left_s = countdown(timeout_s)
        try:
            while not self._over and (current := self._current) is not None:
                current.wait(left_s())
                self._advance(current)
        except BaseException as error:
            step = self._current
            if isinstance(error, ConcurrentUseError) and step is not None and not step.is_completed():
                raise  # The step goes on; see ``Work``.
            self._fail(error)
            raise
        if self._error is not None:  # met by a signal handler that polled meanwhile, or earlier
            raise self._error
        return self._result

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once; takes the steps that can be taken."""
        if self.driven_here() or not self.waiting.acquire(blocking=False):
            return self._over  # The thread that is at it will say so.
        try:
            while not self._over and (current := self._current) is not None:
                if not current.is_completed():
                    return False
                current.wait()
                self._advance(current)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.waiting.release()
        return True
