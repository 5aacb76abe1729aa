"""Ending several things although one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["run_all"]


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
