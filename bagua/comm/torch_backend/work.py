"""Works and futures of the backend ``bagua``, as ``torch.distributed`` wants them; callbacks may communicate and wait.

Callbacks of one group run one after the other in a thread of their own: not in the lanes, which
must carry out the calls for which a callback waits. A callback that waits for a future runs the
callbacks on which that one depends. So one thread is enough, however deep callbacks are nested.

Their order is the same on all ranks: that of the calls, and a callback comes with everything that
it starts before the next one. No callback runs in the thread that adds it, even if its
future is complete: whether it is depends on the moment.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from bagua.comm import torch_private
from bagua.comm.lifetime.background import daemon
from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.work import Work, future_of
from bagua.errors import CommunicationError, CommunicatorClosedError
from bagua.torch_private import backward_pass, when_backward_ends

_log = logging.getLogger("bagua")
#: The threads that run callbacks. A set: looked at by every call.
_runners: set[int] = set()


def in_callback() -> bool:
    """Whether the calling thread runs a callback of a future."""
    return bool(_runners) and threading.get_ident() in _runners


class CallFuture(torch.futures.Future):  # type: ignore[type-arg]  # generic in the stub only
    """A future of a call, or of what a callback makes of another one.

    Args:
        thread: completes this future and runs its callbacks.
    """

    def __init__(self, thread: CallbackThread) -> None:
        super().__init__()
        self._thread = thread
        self._callbacks: deque[Callable[[], None]] = deque()
        #: The thread that takes this sets the value.
        self._unset = deque([True])
        self._settled = False
        #: True once its call is over; it may still wait for its turn.
        self.ready = False
        self._generation = family.generation

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> torch.futures.Future[Any]:
        """A future of ``callback(self)``, which runs when this one is complete."""
        result = CallFuture(self._thread)
        context = contextvars.copy_context()
        self._follow(partial(result.settle, lambda: context.run(callback, self)))
        return result

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Have ``callback(self)`` run when this future is complete; its errors are logged."""
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(callback, self)
            except BaseException:  # noqa: BLE001 - no caller is there to raise it to, and the thread goes on
                _log.exception("a callback of a future failed")

        self._follow(run)

    def wait(self) -> Any:
        """Block until this future is complete, and return its value.

        Raises:
            CommunicatorClosedError: this process was forked after the call was started.
        """
        if not self.done():
            if self._generation != family.generation:
                raise forked_error()
            self._thread.complete(self)
        return super().wait()

    def settle(self, outcome: Callable[[], Any]) -> None:
        """Complete this future with what ``outcome`` returns or raises, and run its callbacks.

        Args:
            outcome: called in the thread of callbacks.
        """
        if not self._set(outcome):
            with contextlib.suppress(Exception):  # It is kept for those who wait.
                super().wait()
        self._settled = True
        self._run_callbacks()

    def settle_early(self, outcome: Callable[[], Any]) -> None:
        """Complete this future, in any thread, if no callback would have to run.

        A callback may wait in C++ for what it has started; ``wait_all`` does. Its thread cannot do it then.
        """
        if not self._callbacks:
            self._set(outcome)

    def _set(self, outcome: Callable[[], Any]) -> bool:
        """Set the value; False if another thread does, or has done so."""
        try:
            self._unset.pop()
        except IndexError:
            return False
        try:
            self.set_result(outcome())
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            self.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        return True

    def _follow(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)
        if self._settled:  # Else ``settle`` finds it.
            self._thread.put(self._run_callbacks)

    def _run_callbacks(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # After the end of the thread others may be here.
                return
            callback()


class CallbackThread:
    """The thread in which the callbacks of one group run. It starts with the first future.

    No lock here is held while anything runs or waits.

    Args:
        name: name of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()
        family.add(self)

    def _begin(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: What callbacks have started: comes before everything else.
        self._nested: deque[Callable[[], None]] = deque()
        #: The calls, in their order; a later one may be complete first.
        self._turns: deque[tuple[CallFuture, Callable[[], None]]] = deque()
        self._thread: threading.Thread | None = None
        self._guard = threading.RLock()
        self._ident = 0
        self._stopped = False

    def disown(self) -> None:
        """In a forked child: what was started is the parent's."""
        _runners.discard(self._ident)
        self._begin()

    def future(self, work: Work | None, outcome: Callable[[], Any], *, in_order: bool = True) -> CallFuture:
        """A future of a started call.

        Args:
            work: the call; None if it is complete.
            outcome: waits for it; returns the value of the future or raises.
            in_order: True if callbacks run in the order of these calls; else in that in which they complete.
        """
        future = CallFuture(self)
        settle = partial(future.settle, outcome)
        if threading.get_ident() == self._ident:
            self._nested.append(settle)
            if work is not None:
                work.when_completed(partial(future.settle_early, outcome))
            return future
        if work is None and not self._turns:
            settle()  # It has no callbacks yet.
            return future
        self._start()
        if not in_order and work is not None:
            work.when_completed(partial(self.put, settle))
            return future
        self._turns.append((future, settle))

        def ready() -> None:
            future.ready = True
            self.put(self._settle_ready)

        if work is None or not work.notify(ready):
            ready()
        return future

    def put(self, task: Callable[[], None]) -> None:
        """Run ``task``, which raises nothing, after what was put before; here, if the thread has ended."""
        if self._stopped:
            task()
        elif threading.get_ident() == self._ident:
            self._nested.append(task)
        else:
            self._queue.put(task)

    def complete(self, future: CallFuture) -> None:
        """In a callback: run what comes before ``future``, which the caller waits for.

        Raises:
            CommunicatorClosedError: the group was closed.
        """
        if threading.get_ident() != self._ident:
            return
        while not future.done():
            if not self._run_next():
                self._queue.put(None)
                raise CommunicatorClosedError("the group was closed while a callback waited")

    def _start(self) -> None:
        with self._guard:
            if self._thread is None and not self._stopped:
                self._thread = daemon(self._name, self._run)

    def _run(self) -> None:
        self._ident = threading.get_ident()
        _runners.add(self._ident)
        try:
            while self._run_next():
                pass
        finally:
            _runners.discard(self._ident)
            self._ident = 0

    def _run_next(self) -> bool:
        """Run one task; False at the end."""
        task = self._nested.popleft() if self._nested else self._take_turn() or self._queue.get()
        if task is None:
            return False
        task()
        return True

    def _take_turn(self) -> Callable[[], None] | None:
        with self._guard:
            if self._turns and self._turns[0][0].ready:
                return self._turns.popleft()[1]
            return None

    def _settle_ready(self) -> None:
        if threading.get_ident() == self._ident:
            return  # It takes turns by itself, when nothing nested is left.
        while (settle := self._take_turn()) is not None:
            settle()

    def stop(self, timeout_s: float = 1.0) -> None:
        """Let what was put run, and end the thread."""
        self._stopped = True
        self._queue.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        if thread is not None and thread.is_alive():
            return
        self._settle_ready()
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    task()


class PlainFutures:
    """Makes futures of torch itself, whose callbacks run where torch runs them: at once, if a future is complete."""

    def future(self, work: Work | None, outcome: Callable[[], Any], *, in_order: bool = True) -> Any:  # noqa: ARG002
        """A future of a started call; see ``CallbackThread.future``."""
        future, settle = future_of(outcome)
        if work is None or work.is_completed():
            settle()
        else:
            work.when_completed(settle)
        return future

    def stop(self) -> None:
        """Nothing is to be ended."""


#: What makes the futures of works.
Callbacks = CallbackThread | PlainFutures

_NO_TIMEOUT = timedelta()
#: Looked up once, as works are made in each call; so are their slots filled more quickly than a dictionary.
_begin = torch_private.Work.__init__


class TorchWork(torch_private.Work):
    """A started call. What C++ holds of it can only wait and take the future.

    Args:
        work: the call; None if it is complete.
        outputs: the tensors that receive its result.
        callbacks: makes its future, and runs the callbacks of that.
        is_message: True if it is for one other rank.
    """

    __slots__ = ("_callbacks", "_is_message", "_outputs", "_was_awaited", "pending")

    def __init__(
        self, work: Work | None, outputs: Sequence[torch.Tensor], callbacks: Callbacks, *, is_message: bool = False
    ) -> None:
        _begin(self)
        self.pending = work
        self._outputs = list(outputs)
        self._callbacks = callbacks
        self._is_message = is_message
        self._was_awaited = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the call is complete.

        Args:
            timeout: zero means the deadline of the call, as in torch.

        Raises:
            CommunicationError: the call failed.
        """
        if self.pending is not None:
            self.pending.wait(timeout or None)
        self._was_awaited = True
        return True

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self.pending is None or self.pending.is_completed()

    def is_success(self) -> bool:
        """Whether the call is complete and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What went wrong, or None; does not wait."""
        return None if self.pending is None else self.pending.exception()

    def result(self) -> list[torch.Tensor]:
        """The tensors that receive the result; complete after ``wait``."""
        return self._outputs

    def _source_rank(self) -> int:
        """Rank in the group of the sender of a message that was received from any rank."""
        assert self.pending is not None
        return int(self.pending.result())

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``; the call makes progress without anybody who waits."""
        if self._was_awaited:  # DDP takes the value of it at once, where ranks may join.
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(self._outputs)
            return future
        return self._callbacks.future(self.pending, self._outcome, in_order=not self._is_message)

    def _outcome(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs


class BackwardPass:
    """The calls of one backward pass. Autograd holds the only strong reference, so it dies with the pass."""

    __slots__ = ("__weakref__", "works")

    def __init__(self) -> None:
        self.works: list[Work] = []

    def __call__(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except CommunicationError as error:
                raise error.with_traceback(None) from error.__cause__


class BackwardWatch:
    """Lets the end of a backward pass raise what its calls raised, not torch's account of it.

    DDP waits for futures in C++, which turns each error into a plain ``RuntimeError``. Who
    queues a callback earlier than DDP does may raise first. Threads may run passes side by side.
    """

    def __init__(self) -> None:
        self._passes: weakref.WeakValueDictionary[int, BackwardPass] = weakref.WeakValueDictionary()

    def add(self, work: Work) -> None:
        """Wait for ``work`` at the end of the backward pass that the calling thread runs, if it runs one."""
        task = backward_pass()
        if task < 0:
            return
        current = self._passes.get(task)
        if current is None:
            self._passes[task] = current = BackwardPass()
            when_backward_ends(current)
        current.works.append(work)
