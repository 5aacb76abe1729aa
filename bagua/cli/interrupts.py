"""However a command is ended, it leaves no process behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """End as after Ctrl-C when this process is terminated: nothing may be left behind."""
    if threading.current_thread() is not threading.main_thread():  # Handlers run in the main thread only.
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals come after this block. Processes that are started in it inherit that, and never see them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def undisturbed(close: Callable[[], object]) -> None:
    """Call ``close``, and let another Ctrl-C wait until it is done."""
    with held_back(signal.SIGINT, signal.SIGTERM):
        close()


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM come after this block: a process that was started in it is known by then.

    Handlers do that, and no mask: a new process would inherit a mask.
    """
    if threading.current_thread() is not threading.main_thread():  # Handlers run in the main thread only.
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda came_now, _: came.append(came_now)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for one in came:
            signal.raise_signal(signal.Signals(one))
