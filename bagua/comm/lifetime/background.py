"""Daemon threads, and whose turn it is where threads or signal handlers share a communicator.

One kind runs submitted functions in order, one talks to a peer that may never answer, and one closes what
belonged to a lost object.

The standard library's executors use non-daemon threads, which keep a process
alive when one of them is stuck in a collective.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the function behind ``signal.getsignal``, which takes 15 times as long
import atexit
import contextlib
import contextvars
import logging
import queue
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Protocol, TypeVar

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
#: Name of the threads of ``beside``.
_BESIDE = "bagua-beside"


class _Task(Future[T]):
    """What was submitted; in a forked child no thread completes it."""

    def __init__(self) -> None:
        super().__init__()
        self._generation = family.generation

    def result(self, timeout: float | None = None) -> T:
        if self._generation != family.generation:
            raise forked_error()
        return super().result(timeout)


def _settle(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - raised by the thread that asks the future
        future.set_exception(error)


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
            if future.set_running_or_notify_cancel():
                _settle(future, partial(context.run, function))

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
            if not self._stopped:
                self._stopped = True
                self._queue.put(None)
            thread = self._thread
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
    if not beside(partial(_settle, outcome, ask)) or not wait([outcome], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return outcome.result()


def bounded(function: Callable[[], T], limit_s: float) -> T | None:
    """The result of ``function``, or None if it fails or takes longer than ``limit_s``; see ``within``."""
    with contextlib.suppress(Exception):  # Nothing that a store can raise may hide the error that led here.
        return within(limit_s, function)
    return None


def beside(function: Callable[[], None]) -> bool:
    """Run ``function`` beside what the caller does; False if no thread can start, and it will not run.

    The end of the process waits a little for it. A thread that comes back from torch into an interpreter that has
    ended takes the process down (SIGABRT).
    """
    try:
        daemon(_BESIDE, function)
    except RuntimeError:
        return False
    return True


def _stop_all() -> None:
    for background in list(_living):
        background.stop(timeout_s=_EXIT_S)
    until = time.monotonic() + _EXIT_S
    for thread in threading.enumerate():
        if thread.name == _BESIDE and thread.is_alive():  # One that is about to start cannot be joined.
            thread.join(max(0.0, until - time.monotonic()))


atexit.register(_stop_all)


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
    """The one thread of this process that closes; it runs as long as there is an owner.

    A finalizer runs between any two instructions of any thread, also of one that holds a lock of
    ours. So it does nothing but hand over what must be closed, without a lock, to this thread, which
    closes what is idle: a slower rank may still need what this one has sent.
    """

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

    #: In a forked child: the thread, and what it has to close, are the parent's.
    disown = _begin

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


#: Those that programs handle: not what the processor raises, nor what cannot be handled.
_SIGNALS = tuple(
    int(number)
    for name in (
        *("HUP", "INT", "QUIT", "PIPE", "ALRM", "TERM", "USR1", "USR2", "CHLD", "CONT", "TSTP", "URG"),
        *("XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR"),
    )
    if (number := getattr(signal, f"SIG{name}", None)) is not None
)
#: What Python and the system do by themselves.
_NO_HANDLERS = frozenset([signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, None])


def handlers_may_call() -> bool:
    """Whether a signal handler of the program may interrupt the calling thread, and communicate."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    try:
        return not _NO_HANDLERS.issuperset(map(_signal.getsignal, _SIGNALS))
    except TypeError:  # a handler that cannot be hashed
        return True


class Turns:
    """Stands for the lock of a communicator: other threads wait for their turn, instead of being refused."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._taken = False

    def acquire(self, blocking: bool = False) -> bool:  # noqa: ARG002 - as a lock is asked
        """Wait for other threads; False if the calling thread was interrupted in its own turn."""
        self._lock.acquire()
        if self._taken:
            self._lock.release()
            return False
        self._taken = True
        return True

    def locked(self) -> bool:
        """Whether it is somebody's turn."""
        return self._taken

    def release(self) -> None:
        """Let the next one come."""
        self._taken = False
        self._lock.release()
