"""The state for newcomers, from the thread that trains to the one that exchanges."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Handover"]

#: Pause between two looks at whether the state is still needed, in seconds.
_LOOK_S = 0.1


class Handover:
    """The thread that exchanges asks for the state, and the one that trains copies it when it is whole.

    Args:
        changed: is notified when one of them has something for the other one.
        state: returns the state, in the thread that trains.

    Attributes:
        asked: True if the state is waited for.
    """

    def __init__(self, changed: threading.Condition, state: Callable[[], Mapping[str, object]]) -> None:
        self._changed = changed
        self._state = state
        self._given: Any = None
        self._asks = 0
        self.asked = False

    def ask(self, check: Callable[[], None], needed: Callable[[], bool]) -> Mapping[str, object] | None:
        """The state, when it is there; None if no newcomer needs it any more.

        Args:
            check: raises if this process leaves.
            needed: returns whether somebody waits for the state.
        """
        given: Any
        with self._changed:
            self._asks += 1
            self.asked = True
            self._changed.notify_all()
            while self.asked:
                self._changed.wait(_LOOK_S)
                check()
                # A thread that makes no step for minutes must not make all wait, if another member gives the state.
                if not needed():
                    self.asked = False
            given, self._given = self._given, None
        if isinstance(given, BaseException):
            raise given
        told: Mapping[str, object] | None = given
        return told

    def answer(self) -> None:
        """Copy the state for who has asked: training goes on while it is sent."""
        given: Any
        asks = self._asks
        try:
            given = copy.deepcopy(self._state())
        except BaseException as error:  # noqa: BLE001 - the thread that asked ends with it, and then this one
            given = error
        with self._changed:
            if asks == self._asks and self.asked:
                self._given, self.asked = given, False
                self._changed.notify_all()
                return
        # It was for another newcomer, and is too old for this one. What a signal handler has raised is for this thread.
        if isinstance(given, BaseException) and not isinstance(given, Exception):
            raise given
