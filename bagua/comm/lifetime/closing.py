"""The end of a process: why it comes, and ending several things although one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable


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
