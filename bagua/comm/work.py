"""Handles of calls that were started with ``async_op=True``."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua.comm.arguments import as_seconds
from bagua.comm.forks import family, forked_error

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
            CommunicationError: what went wrong. Also a ``timeout`` that passes breaks the
                communicator, because the ranks no longer agree on what has happened.
        """
        timeout_s = None if timeout is None else as_seconds(timeout)
        if self._inherited() and not self._finished:
            raise forked_error()
        with self._waiting:
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
        return True

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
        """A future of ``result()``, completed by whoever completes the call, else by a thread that waits for it."""
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
        elif not self._notify(callback):

            def after_waiting() -> None:
                with contextlib.suppress(Exception):  # It is kept for whoever asks.
                    self.wait()
                callback()

            threading.Thread(target=after_waiting, name="bagua-future", daemon=True).start()

    def _notify(self, callback: Callable[[], None]) -> bool:  # noqa: ARG002  # of those who can tell
        """See ``Handle.notify``."""
        return False


class PendingWork(Work):
    """One started call of a transport.

    Args:
        complete: waits for it, at most the given seconds, and returns the result.
        poll: whether it is complete.
        notify: see ``Handle.notify``.
    """

    def __init__(
        self,
        complete: Callable[[float | None], Any],
        poll: Callable[[], bool],
        notify: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        super().__init__()
        self._complete_call = complete
        self._poll_call = poll
        self._notify_call = notify

    def _complete(self, timeout_s: float | None) -> Any:
        return self._complete_call(timeout_s)

    def _poll(self) -> bool:
        return self._poll_call()

    def _notify(self, callback: Callable[[], None]) -> bool:
        return self._notify_call is not None and self._notify_call(callback)


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

    def _complete(self, timeout_s: float | None) -> None:
        for work in self._works:
            work.wait(timeout_s)
        if self._finish is not None:
            self._finish()

    def _poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _notify(self, callback: Callable[[], None]) -> bool:
        completed = itertools.count(1)

        def one_more() -> None:
            if next(completed) == len(self._works):
                callback()

        for work in self._works:
            work.when_completed(one_more)
        return True


class CompositeWork(Work):
    """A collective made of several, advanced by whoever waits for it.

    Creating one starts its first step. A later call on the same communicator first
    finishes it, so all ranks issue the steps in one order.

    Args:
        steps: yields each started work and returns the result.
        released: called once, when no step is left.
    """

    def __init__(self, steps: Steps, released: Callable[[CompositeWork], None]) -> None:
        super().__init__()
        self._steps = steps
        self._released = released
        self._driver: int | None = None
        self._current: Work | None = None
        self._advance()

    def driven_here(self) -> bool:
        """Whether the calling thread is the one that advances the steps right now."""
        return self._driver == threading.get_ident()

    def _advance(self) -> None:
        self._driver, outer = threading.get_ident(), self._driver
        try:
            self._current = next(self._steps)
        except StopIteration as end:
            self._result = end.value
            self._current = None
            self._released(self)
        except BaseException:
            self._released(self)
            raise
        finally:
            self._driver = outer

    def _complete(self, timeout_s: float | None) -> Any:
        while self._current is not None:
            try:
                self._current.wait(timeout_s)
            except BaseException:
                self._released(self)
                self._steps.close()
                raise
            self._advance()
        return self._result

    def _poll(self) -> bool:
        while self._current is not None:
            if not self._current.is_completed():
                return False
            try:
                self._current.wait()
                self._advance()
            except Exception as error:  # noqa: BLE001 - raised by wait
                self._released(self)
                self._error, self._finished = error, True
                return True
        return True
