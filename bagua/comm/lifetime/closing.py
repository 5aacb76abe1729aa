"""The end of a process: why it comes, and ending several things although one of them fails."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

import torch

from bagua.errors import BaguaError, blame


def run_all(actions: Iterable[Callable[[], object]]) -> None:
    """Run all of ``actions`` in order, then raise the first error that one of them raised.

    Example:
        >>> run_all([lambda: 1 / 0, lambda: print("runs all the same")])
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
    """
    first: BaseException | None = None
    for action in actions:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - raised below; the rest must end, too
            first = error if first is None else first
    if first is not None:
        raise first


def uncaught_error() -> BaseException | None:
    """What ends this process, for its exit handlers: the error whose traceback the interpreter has printed, or None.

    At a prompt that is some error of the past, with which nothing ended.
    """
    error: BaseException | None = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    return error


#: Where frames are that do not help a user to find a mistake.
_INSIDE = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent) + os.sep)


def own_traceback(error: BaseException) -> str:
    """The traceback of ``error`` without frames of bagua and torch, if others are left; of ours only what happened.

    Example:
        >>> print(own_traceback(ValueError("no")), end="")
        ValueError: no
    """
    told = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = told
    while one is not None:
        own = [frame for frame in one.stack if not frame.filename.startswith(_INSIDE)]
        one.stack = traceback.StackSummary.from_list(own or list(one.stack))
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    if not isinstance(error, BaguaError):
        return "".join(told.format())
    # Its causes are errors of libraries, and what follows the first line are calls: both are in the flight record.
    frames = "".join(["Traceback (most recent call last):\n", *told.stack.format()]) if told.stack else ""
    return f"{frames}{type(error).__name__}: {str(error).partition(chr(10))[0]}\n"


def report_uncaught(rank: int, error_file: str) -> None:
    """From now on, an error that ends this process is printed without inner frames, and handed to the launcher.

    Args:
        rank: global rank of this process, which is printed with the error.
        error_file: file that the launcher reads, in the form of ``torch.distributed.elastic``.
    """
    usual = sys.excepthook
    plain = usual is sys.__excepthook__ or getattr(usual, "__module__", "").startswith("torch.")

    def report(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        try:
            whole, own = "".join(traceback.format_exception(kind, error, frames)), own_traceback(error)
            culprit, _ = blame(error, rank, "its script")
            facts = {"py_callstack": whole, "timestamp": str(int(time.time())), "own": own, "rank": rank}
            last = own.rstrip().rpartition("\n")[2]
            short = f"{kind.__name__}: {error.problem}" if isinstance(error, BaguaError) else last
            message = {"message": short, "extraInfo": {**facts, "culprit": culprit}}
            Path(error_file).write_text(json.dumps({"message": message}), encoding="utf-8")
        except Exception:  # noqa: BLE001  # an error that cannot be told, or a full disk
            usual(kind, error, frames)
            return
        if not plain:  # A hook that the program chose shows what it wants to show.
            usual(kind, error, frames)
            return
        shown = own if culprit == rank else f"{last}\n"
        with contextlib.suppress(OSError):
            sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in shown.splitlines(keepends=True)))

    sys.excepthook = report
