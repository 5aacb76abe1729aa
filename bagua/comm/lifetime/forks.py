"""What a forked child inherits, and leaves to its parent.

A child of ``os.fork`` has a copy of every object but none of the threads, and it shares
all sockets with its parent. So each communicator refuses calls in the child, nothing
there talks to other ranks or to the store, and torch's objects are never destroyed:
their destructors wait for threads that the child does not have.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from bagua.errors import CommunicatorClosedError


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


class Disowned(Protocol):
    """Something that belongs to the process that made it, not to forked children."""

    def disown(self) -> None:
        """Become inert. Runs in each forked child, where a lock of this object may never be released."""


class Family:
    """Whatever must become inert in forked children.

    Attributes:
        generation: grows in each forked child: tells what a process made from what it inherited.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._first: weakref.WeakSet[Disowned] = weakref.WeakSet()
        self._members: weakref.WeakSet[Disowned] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._disown_all)

    def add(self, member: Disowned, *, first: bool = False) -> None:
        """Have ``member`` disowned in each forked child of this process, as long as it lives.

        Args:
            member: an object with locks, threads or connections.
            first: True for one that must come before all others, which may drop what it has to find.
        """
        (self._first if first else self._members).add(member)

    def _disown_all(self) -> None:
        self.generation += 1
        run_all(member.disown for member in [*self._first, *self._members])


#: The one of this process.
family = Family()


def forked_error() -> CommunicatorClosedError:
    """The error for a forked child that uses what its parent made."""
    return CommunicatorClosedError(
        "this process was forked; the communicator is its parent's",
        advice="Communicate in the parent only. A child may call destroy_process_group() and start a world of its own.",
    )


def leak(thing: object) -> None:
    """Never destroy ``thing``, not even when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
