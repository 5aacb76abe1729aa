"""However a command is ended, it leaves no process behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def handled(handler: Callable[[int, Any], object] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Let ``handler`` handle signals until the end of the block. Only the main thread has handlers."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """End as after Ctrl-C when this process is terminated: nothing may be left behind."""
    with handled(signal.default_int_handler, signal.SIGTERM):
        yield


@contextlib.contextmanager
def held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Let signals come after this block. Processes that are started in it inherit that, and never see them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end(processes: Sequence[subprocess.Popen[Any]], limit_s: float) -> None:
    """Terminate ``processes``, and kill those that still run after ``limit_s`` seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + limit_s
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM come after this block: a process that was started in it is known by then.

    Handlers do that, and no mask: a new process would inherit a mask.
    """
    came: list[int] = []
    try:
        with handled(lambda number, _: came.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        for one in came:
            signal.raise_signal(signal.Signals(one))
