"""Background threads of one rank: calls of one lane run in order, lanes do not wait for each other."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from bagua.comm.lifetime.background import BackgroundThread, handlers_may_call
from bagua.comm.transports.contract import DONE, Handle, Transport, after
from bagua.comm.transports.memory.line import Deadline
from bagua.errors import CollectiveTimeoutError, CommunicatorClosedError, ConcurrentUseError

#: How long a signal handler may have to wait.
_SLICE_S = 0.1
#: What a lane may take after the deadline to find out what to say.
_GRACE_S = 0.2
#: ``COLLECTIVE``, ("send", to whom) or ("recv", from whom).
Lane = tuple[str, int]
COLLECTIVE: Lane = ("collective", -1)


Task = Callable[[], None]
#: Ends the communicator, for a reason, because nobody waits any more for what was started on it.
Abandoned = Callable[[str], None]


class LaneTask:
    """What one lane does for a call.

    Not a ``Future`` of the standard library, which takes a lock in Python: a signal handler that
    interrupts a wait would keep it, and the lane could not go on to what the handler waits for.

    Args:
        task: function that makes the call, or raises its error.
        caller: the thread that is to do it, by its number; 0 for that of the lane.

    Attributes:
        caller: the same.
        done: True when it is over.
        ended_at: when it was over, by ``time.perf_counter()``; 0.0 before that.
        error: error of ``task``.
    """

    __slots__ = ("_callbacks", "_task", "caller", "done", "ended_at", "error")

    def __init__(self, task: Task, caller: int = 0) -> None:
        self._task: Task | None = task
        self._callbacks: list[Callable[[LaneTask], None]] = []
        self.done = False
        self.caller = caller
        self.ended_at = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Do it, and tell those who wait."""
        task, self._task = self._task, None  # The user's tensors must not outlive the call here.
        try:
            if task is not None:
                task()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            self.error = error
        del task
        self.end()

    def end(self) -> None:
        """Tell those who wait that it is over, done or not. Idempotent."""
        self.ended_at = time.perf_counter()
        self.done = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # Another thread took the last one.
                return
            callback(self)

    def require_other_thread(self) -> None:
        """Raise ``ConcurrentUseError`` if the calling thread would wait for what it does itself, further out."""
        if self.caller == threading.get_ident():
            raise ConcurrentUseError(
                "a call was made in the middle of another one of the same thread",
                advice="Finalizers must not communicate; signal handlers may, if they are installed before that call.",
            )

    def when_done(self, callback: Callable[[LaneTask], None], *, first: bool = False) -> None:
        """Have ``callback``, which raises nothing, run when it is over.

        Args:
            callback: runs once, in the lane or here.
            first: True for one that comes before the others, which may wait for a thread that this one wakes.
        """
        self._callbacks.insert(0 if first else len(self._callbacks), callback)
        if self.done:
            try:
                self._callbacks.remove(callback)
            except ValueError:  # It has run.
                return
            callback(self)


class Lanes:
    """The lanes of one rank; a thread starts with the first call that needs it.

    Messages have lanes of their own, so that ``send`` and ``recv`` that both ranks
    start with ``async_op`` in the same order do not wait for each other in vain.

    Args:
        name: name of the threads, for debuggers.

    Attributes:
        shared: True if several threads make calls; see ``Transport.share``.
        latest: task that was started last, by lane.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: dict[Lane, BackgroundThread] = {}
        self.latest: dict[Lane, LaneTask] = {}
        #: Of each lane the latest that its caller does by itself; an earlier one is over.
        self._inline: dict[Lane, LaneTask] = {}
        self._stopped = False
        self.shared = False

    def idle(self, *lanes: Lane) -> bool:
        """Whether all calls of these lanes are complete."""
        for lane in lanes:
            latest = self.latest.get(lane)
            if latest is not None and not latest.done:
                return False
        return True

    def busy(self) -> bool:
        """Whether a call of any lane is not complete."""
        return any(not latest.done for latest in list(self.latest.values()))

    def start(self, lane: Lane, task: Task, deadline: Deadline, abandoned: Abandoned, *, asynchronous: bool) -> Handle:
        """Run ``task`` in the calling thread if it may wait there, else behind the earlier calls of its lane.

        Args:
            lane: lane of the call.
            task: does the call; raises what went wrong.
            deadline: moment at which the call must be over.
            abandoned: told why, when a wait is given up.
            asynchronous: True if the caller goes on at once.
        """
        if not asynchronous and self.idle(lane):
            if not self.shared:
                task()
                return DONE
            if not handlers_may_call():
                return self.inline([lane], task, deadline, abandoned)
        return LaneHandle([self.submit(lane, task)], deadline, abandoned)

    def submit(self, lane: Lane, task: Task) -> LaneTask:
        """Run ``task`` when the earlier calls of its lane are complete.

        It runs in a copy of the caller's context, so that a rank that is a thread
        finds its own default group there.

        Raises:
            CommunicatorClosedError: the lanes were stopped.
            ConcurrentUseError: the calling thread is in the middle of the call before.
        """
        before = self._inline.get(lane)
        self._require_running()
        thread = self._threads.get(lane)
        if thread is None:
            thread = self._threads[lane] = BackgroundThread(f"{self._name}-{lane[0]}")
        part = LaneTask(partial(contextvars.copy_context().run, task))
        try:
            if before is not None and not before.done:
                before.require_other_thread()
                thread.put(partial(_await, before))
            thread.put(part.run)
        except RuntimeError as error:
            if isinstance(error, ConcurrentUseError):
                raise
            raise CommunicatorClosedError("the communicator was closed") from error
        self.latest[lane] = part
        self._require_running()  # ``stop`` may have come meanwhile, out of a signal handler.
        return part

    def _require_running(self) -> None:
        if self._stopped:
            raise CommunicatorClosedError("the communicator was closed")

    def inline(self, lanes: Sequence[Lane], task: Task, deadline: Deadline, abandoned: Abandoned) -> LaneHandle:
        """``task`` for the calling thread to do in ``Handle.wait``; later calls of its lanes come after it."""
        part = LaneTask(task, threading.get_ident())
        for lane in lanes:
            self.latest[lane] = self._inline[lane] = part
        return LaneHandle((part,), deadline, abandoned)

    def abandon(self) -> None:
        """The communicator is broken: no thread has to wait for a call that its thread may never make."""
        for part in list(self._inline.values()):
            part.end()

    def stop(self, timeout_s: float) -> bool:
        """Finish what was submitted, end the threads, and say whether they ended in time."""
        self._stopped = True
        until = time.perf_counter() + timeout_s
        ended = True
        for thread in list(self._threads.values()):
            ended &= thread.stop(max(until - time.perf_counter(), 0.0))
        return ended


def _await(part: LaneTask) -> None:
    over = threading.Lock()
    over.acquire()
    part.when_done(lambda _: over.release(), first=True)
    over.acquire()


class LaneHandle(Handle):
    """A call in one lane, or ``sendrecv`` in two. Some are made by the thread that waits; see ``Lanes.inline``.

    Args:
        parts: task of each lane.
        deadline: moment at which the call must be over.
        abandoned: told why, when a wait is given up.
    """

    __slots__ = ("_abandoned", "_deadline", "_parts")

    def __init__(self, parts: Sequence[LaneTask], deadline: Deadline, abandoned: Abandoned) -> None:
        self._parts = parts
        self._deadline = deadline
        self._abandoned = abandoned

    def wait(self, timeout_s: float | None = None) -> None:
        """Make the call, or block until all parts are complete; see ``Handle.wait``."""
        parts = self._parts
        if parts[0].caller:
            parts[0].run()  # It keeps to its deadline.
            if parts[0].error is not None:
                raise parts[0].error
            return
        if not self._settled():
            # At its own deadline the lane raises an error that knows more: let it.
            remaining = self._deadline.at - time.perf_counter() + _GRACE_S
            self._sleep(max(remaining if timeout_s is None else min(timeout_s, remaining), 0.0))
        completed = self.is_completed()  # Before the errors: a part that fails from here on must not look complete.
        for part in parts:
            if part.error is not None:
                raise part.error
        if not completed:
            timeout_s = self._deadline.timeout_s if timeout_s is None else timeout_s
            self._abandoned(f"it gave up after a wait of {timeout_s:g} s")
            raise CollectiveTimeoutError("the call did not complete in time", timeout_s=timeout_s)

    def _settled(self) -> bool:
        """Whether all parts are over, or one has failed."""
        over = True
        for part in self._parts:  # In each call: see ``is_completed``.
            if part.error is not None:
                return True
            over &= part.done
        return over

    def _sleep(self, seconds: float) -> None:
        bell = threading.Lock()
        bell.acquire()

        def ring(_: LaneTask) -> None:
            if self._settled():
                with contextlib.suppress(RuntimeError):  # It rings already.
                    bell.release()

        for part in self._parts:
            part.when_done(ring, first=True)
        until = time.perf_counter() + seconds
        # In slices: a signal that comes just before the lock is waited for would be handled only after it.
        while not bell.acquire(timeout=min(_SLICE_S, max(seconds, 0.0))) and seconds > 0:
            seconds = until - time.perf_counter()

    def is_completed(self) -> bool:
        """Whether all parts are complete."""
        for part in self._parts:  # noqa: SIM110 - each call asks several times: a generator takes three times as long
            if not part.done:
                return False
        return True

    @property
    def failed(self) -> bool:
        """Whether a part has failed."""
        return any(part.error is not None for part in self._parts)

    @property
    def ended_at(self) -> float | None:
        """When the last part was complete; None before that."""
        moments = [part.ended_at for part in self._parts]
        return max(moments) if all(moments) else None

    def notify(self, callback: Callable[[], None]) -> bool:
        """Run ``callback`` in the lane whose part is the last to complete."""
        one_more = after(len(self._parts), callback)
        for part in self._parts:
            part.when_done(one_more)
        return True


class LanesTransport(Transport):
    """A transport whose calls run in lanes, in threads of their own where they cannot run in that of the caller."""

    _lanes: Lanes

    def share(self) -> None:
        """Several threads make its calls from now on."""
        self._lanes.shared = True

    def idle(self) -> bool:
        """Whether all calls are complete."""
        return not self._lanes.busy()

    def _stop_lanes(self) -> None:
        """Let calls finish for a second; then end them."""
        if not self._lanes.stop(timeout_s=1.0):
            self.abort("it closed its communicator with calls under way")
            self._lanes.stop(timeout_s=1.0)
