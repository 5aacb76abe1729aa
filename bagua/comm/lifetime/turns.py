"""What a communicator needs to be used by several threads, and by signal handlers in the middle of its calls."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the function behind ``signal.getsignal``, which takes 15 times as long
import signal
import threading

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
