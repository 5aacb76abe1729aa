"""Started calls of a ``torch.distributed`` backend, and how to wait for them.

A wait inside torch runs no Python signal handler. So collectives are waited for in
slices, which is free for those that take less than one; and messages, whose
connection a timed-out wait would close, are waited for by a helper thread.

No host thread waits for works on CUDA streams. One thread per process watches them, alive
while something is outstanding. It ends a communicator at the deadline of a call, or when
a notice of a peer says why that left; the error comes out of the next call or ``wait`` on
that communicator.
"""

from __future__ import annotations

import atexit
import threading
import time
from abc import abstractmethod
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import torch

from bagua.comm.call import POINT_TO_POINT, Call
from bagua.comm.lifetime.background import BackgroundThread, daemon
from bagua.comm.lifetime.forks import family, leak
from bagua.comm.long_wait import LongWait
from bagua.comm.transports.c10d.lowering import Finish, as_timedelta
from bagua.comm.transports.contract import Handle
from bagua.comm.transports.failure import FailureFinder
from bagua.errors import CommunicationError

#: How long Ctrl-C may have to wait.
SLICE_S = 0.1
_SLICE = timedelta(seconds=SLICE_S)
#: A helper's wait ends this much after the deadline: the deadline is enforced by its owner.
_GRACE_S = 1.0
_POLL_S = 0.001
#: Time between two looks at works on streams, and between two looks for notices.
_WATCH_POLL_S = 0.02
_NOTICE_POLL_S = 0.5


def _one_peer(call: Call) -> int | None:
    """The only rank that ``call`` waits for, if there is just one."""
    one = call.kind in POINT_TO_POINT and call.root >= 0 and call.source in (-1, call.root)
    return call.root if one else None


class C10dHandle(Handle):
    """What all started calls share: their clock, and that they complete once.

    Args:
        failures: knowledge of the failures of the communicator.
        works: torch's works, which make up the call.
        finish: completes the call after the works.
        timeout_s: its deadline, from now.
        kept: tensors that must live until the call is complete.

    Attributes:
        call: call that was started; None if that is not known.
    """

    __slots__ = ("_error", "_failures", "_finish", "_kept", "_started", "_timeout_s", "_works", "call")

    def __init__(
        self, failures: FailureFinder, works: tuple[Any, ...], finish: Finish | None, timeout_s: float, kept: Any
    ) -> None:
        self._failures = failures
        self._works: tuple[Any, ...] | None = works
        self._finish = finish
        self._timeout_s = timeout_s
        self._kept = kept
        self._started = time.monotonic()
        self._error: BaseException | None = None
        self.call: Call | None = None

    def wait(self, timeout_s: float | None = None) -> None:
        if self._works is None:
            if self._error is not None:
                raise self._error
            return
        try:
            self._wait(timeout_s)
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            self._error = error
            if not isinstance(error, CommunicationError):  # Ctrl-C, say: end it before the tensors go back to the user.
                self._failures.abort(f"it left a call with {type(error).__name__}: {error}")
                self.settle()
            raise
        finally:
            # Torch's objects must not outlive the transport, nor the user's tensors this call.
            self._works = self._finish = self._kept = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    @abstractmethod
    def _wait(self, timeout_s: float | None) -> None:
        """Wait for the works, at most ``timeout_s``, and translate their errors."""

    @abstractmethod
    def settle(self, limit_s: float = 1.0) -> None:
        """Let works end whose connections are closed, so that they touch no tensor afterwards."""

    def unattended(self) -> None:
        """The caller goes on without waiting."""
        return

    def then(self, finish: Finish) -> None:
        """Add what is to be done when the call is complete."""
        first = self._finish

        def both() -> None:
            if first is not None:
                first()
            finish()

        self._finish = both

    def discard(self, error: BaseException) -> None:
        """The transport is closed: let go of torch's objects; later waits raise ``error``."""
        if self._works is not None:
            self.settle()
            self._error = error
            self._works = self._finish = self._kept = None

    def disown(self, error: BaseException) -> None:
        """In a forked child: the call is the parent's; later waits raise ``error``."""
        leak(self._works)
        self._error = error
        self._works = self._finish = self._kept = None

    def elapsed_s(self) -> float:
        """Seconds since the call was started."""
        return time.monotonic() - self._started

    def _timed_out(self) -> CommunicationError:
        """End the communicator because the deadline passed, or the caller wants to wait no longer."""
        impatient = self._left_s(None) > SLICE_S
        peer = None if self.call is None else _one_peer(self.call)
        return self._failures.timed_out(self.elapsed_s(), self._timeout_s, peer=peer, impatient=impatient)

    def _left_s(self, until: float | None) -> float:
        """Seconds until the deadline, or until the earlier moment ``until``."""
        now = time.monotonic()
        left = self._started + self._timeout_s - now
        return left if until is None else min(left, until - now)


def _has_failed(work: Any) -> bool:
    """Whether a work has failed. Torch has deprecated asking it; to wait for one that is complete does not block."""
    if work.is_completed():
        try:
            work.wait()
        except RuntimeError:
            return True
    return False


class HostHandle(C10dHandle):
    """Works that the host waits for, in slices.

    Args:
        waiters: who waits for messages of Gloo, whose state is unknown until then, and which can be waited for once;
            None for collectives.
    """

    __slots__ = ("_unknown", "_waiters")

    def __init__(self, *arguments: Any, waiters: Waiters | None = None) -> None:
        super().__init__(*arguments)
        self._waiters = waiters
        #: Whether nobody has begun to wait for messages, and nobody can tell their state.
        self._unknown = waiters is not None

    def unattended(self) -> None:
        # Somebody must wait, or is_completed would never know.
        if self._unknown and self._waiters is not None and self._works:
            limit = as_timedelta(max(self._left_s(None), 0.0) + _GRACE_S)
            self._works = (self._waiters.wait_for(self._works, limit),)
            self._unknown = False

    def _wait(self, timeout_s: float | None) -> None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        if self._unknown and (timeout_s is not None or threading.current_thread() is threading.main_thread()):
            self.unattended()
        for work in self._works or ():
            left = self._left_s(until)
            try:
                work.wait(_SLICE if left > SLICE_S and not self._unknown else as_timedelta(left))
                continue
            except RuntimeError as error:
                # Its traceback holds this frame: a cycle would keep torch's objects until the next garbage collection.
                problem = error.with_traceback(None)
            if self._unknown:
                raise self._judge(problem) from problem
            self._wait_on(work, until, problem)  # Out here its errors have no misleading context.

    def _wait_on(self, work: Any, until: float | None, error: RuntimeError) -> None:
        """Go on waiting after ``error``, which may be nothing but the end of a slice."""
        wait = LongWait(judge=self._failures.judge)
        while True:
            if wait.is_over():
                self._failures.warn_of(wait, self.call)
            # A peer that found the same may have left by now, and ended the work.
            if (trouble := wait.trouble()) is not None and (not work.is_completed() or _has_failed(work)):
                raise trouble from error
            if work.is_completed():
                # The slice may have ended just before the work: only its own word counts.
                try:
                    work.wait()
                except RuntimeError as failure:
                    raise self._judge(failure) from failure
                return
            left = self._left_s(until)
            if self._failures.peers_left():  # Their notice may come before their connections close.
                raise self._failures.failed(error, self.elapsed_s(), self._timeout_s)
            if left <= 0:
                timed_out = self._timed_out()
                self.settle()
                raise timed_out from error
            try:
                work.wait(as_timedelta(min(SLICE_S, left)))
            except RuntimeError as again:
                error = again.with_traceback(None)
            else:
                return

    def _judge(self, failure: RuntimeError) -> CommunicationError:
        # The backend has the same deadline, and its clock may be a little ahead; perhaps no thread has waited before.
        overdue = self._left_s(None) <= SLICE_S and "timed out" in str(failure).lower()
        if overdue:
            return self._timed_out()
        return self._failures.failed(failure, self.elapsed_s(), self._timeout_s)

    def settle(self, limit_s: float = 1.0) -> None:
        deadline = time.monotonic() + limit_s
        for work in () if self._unknown else self._works or ():
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(_POLL_S)

    def is_completed(self) -> bool:
        works = self._works
        return not works or (not self._unknown and all(work.is_completed() for work in works))

    @property
    def failed(self) -> bool:
        return super().failed or (not self._unknown and any(map(_has_failed, self._works or ())))


class StreamHandle(C10dHandle):
    """Works on a CUDA stream: waiting makes the current stream wait, the host goes on."""

    __slots__ = ()

    def unattended(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # Nothing runs yet, and asking would spoil the graph.
        monitor.watch(StreamWatch(self._failures, self._works or (), self._timeout_s, self.call))

    def _wait(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            until = time.monotonic() + timeout_s
            while not self.is_completed():
                if self._left_s(until) <= 0:
                    raise self._timed_out()
                time.sleep(_POLL_S)
        self._failures.check_usable()
        for work in self._works or ():
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failures.failed(error, self.elapsed_s(), self._timeout_s) from error
        self._failures.check_usable()  # Again: a barrier holds the host, also one that was ended meanwhile.

    def settle(self, limit_s: float = 1.0) -> None:  # noqa: ARG002
        return  # An aborted communicator writes nothing.

    def is_completed(self) -> bool:
        return all_completed(self._works or ())


class _Awaited:
    """Works for which a helper thread waits, as one work that knows whether it is complete.

    Args:
        works: torch's works. They live as long as this does.
        future: completed by the thread.
    """

    def __init__(self, works: tuple[Any, ...], future: Future[None]) -> None:
        self._works = works
        self._future = future

    def is_completed(self) -> bool:
        """Whether the thread is done."""
        return self._future.done()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the thread is done, and raise what it met.

        Raises:
            RuntimeError: a work failed, or the thread goes on after ``timeout``.
        """
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except FutureTimeoutError:
            raise RuntimeError("the time for waiting is over") from None


class Waiters:
    """Threads that wait for messages, as many as there are messages waited for at a time."""

    def __init__(self) -> None:
        self._idle: list[BackgroundThread] = []
        self._all: list[BackgroundThread] = []

    def wait_for(self, works: tuple[Any, ...], limit: timedelta) -> _Awaited:
        """Wait for ``works`` from now on, in a thread that does nothing else meanwhile.

        Args:
            works: works of Gloo.
            limit: time that each of them is given.
        """
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = BackgroundThread("bagua-message")
            self._all.append(thread)

        def wait() -> None:
            for work in works:
                work.wait(limit)

        future = thread.submit(wait)
        future.add_done_callback(lambda _: self._idle.append(thread))
        return _Awaited(works, future)

    def stop(self) -> None:
        """End the threads."""
        for thread in self._all:
            thread.stop()
        self._all.clear()
        self._idle.clear()


# Works on CUDA streams.


def all_completed(works: tuple[Any, ...]) -> bool:
    """Whether the device is done with all of ``works``, or one of them has failed: waiting raises that."""
    try:
        return all(work.is_completed() for work in works)
    except RuntimeError:
        return True


class StreamWatch:
    """What the monitor watches of a started call: its works themselves, for the host does not wait for their end.

    Args:
        failures: knowledge of the failures of the communicator.
        works: torch's works of the call.
        timeout_s: deadline of the call, from now.
        call: the call, which its error names, although a later one raises it.
    """

    def __init__(
        self, failures: FailureFinder, works: tuple[Any, ...], timeout_s: float, call: Call | None = None
    ) -> None:
        self._failures = failures
        self._call = call
        self._works = works
        self._timeout_s = timeout_s
        self._started = time.monotonic()

    def is_over(self, ask: bool) -> bool:
        """Whether nothing is left to watch: the device is done, or the communicator is broken, perhaps here and now.

        Args:
            ask: look for a notice of a peer, too, which may take a moment.
        """
        failures = self._failures
        if failures.broken or all_completed(self._works):
            return True
        if self._elapsed_s() >= self._timeout_s:
            failures.end_unattended(lambda: self._of_call(failures.timed_out(self._elapsed_s(), self._timeout_s)))
            return True
        if ask and failures.peers_left():
            left = ConnectionError("a peer left")
            failures.end_unattended(lambda: self._of_call(failures.failed(left, self._elapsed_s(), self._timeout_s)))
            return True
        return False

    def _of_call(self, error: CommunicationError) -> CommunicationError:
        if self._call is not None:
            error.call, error.sequence = str(self._call), self._call.sequence
        return error

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started


class Monitor:
    """Watches started calls until they are complete.

    Args:
        poll_s: how often calls are looked at.
        notice_poll_s: how often notices of peers are looked for.
    """

    def __init__(self, poll_s: float = _WATCH_POLL_S, notice_poll_s: float = _NOTICE_POLL_S) -> None:
        self._poll_s = poll_s
        self._notice_poll_s = notice_poll_s
        self._watched: list[StreamWatch] = []
        #: Let go by those who start calls. To drop a work destroys events of CUDA, for which this thread might wait
        #: while another copies the result of a call from the device: and nobody would end that call.
        self._over: list[StreamWatch] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        family.add(self)

    def disown(self) -> None:
        """In a forked child, which has no such thread: its parent watches."""
        self._changed = threading.Condition()
        self._watched, self._over = [], []
        self._thread = None

    def watch(self, call: StreamWatch) -> None:
        """Look after ``call`` until it is complete."""
        with self._changed:
            over, self._over = self._over, []
            self._watched.append(call)
            if self._thread is None and not self._stopped:
                # It fails where there may be no more threads; the next call tries again.
                self._thread = daemon("bagua-monitor", self._run)
            self._changed.notify()
        del over  # Without the lock, which this thread could hold for long.

    def _run(self) -> None:
        asked = time.monotonic()
        while True:
            with self._changed:
                while not self._watched and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                calls = list(self._watched)
            ask = time.monotonic() - asked >= self._notice_poll_s
            over = [call for call in calls if call.is_over(ask)]
            if ask:
                asked = time.monotonic()
            with self._changed:
                self._over += over
                self._watched = [call for call in self._watched if call not in over]
                del calls, over  # Or this thread would be the last to let go.
                self._changed.wait_for(lambda: self._stopped, self._poll_s)

    def stop(self) -> None:
        """End the thread; nothing is watched any more."""
        with self._changed:
            self._stopped = True
            self._watched.clear()
            self._over.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)


#: The one of this process.
monitor = Monitor()
atexit.register(monitor.stop)
