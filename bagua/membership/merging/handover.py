"""The state for newcomers, from the thread that trains to the one that exchanges."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

from bagua.membership.island import Island

#: Pause between two looks at whether the state is still needed, in seconds.
_LOOK_S = 0.1


class Handover:
    """The thread that exchanges asks for the state, and the one that trains copies it when it is whole.

    All ranks of an island ask together. The first one decides whether they still need the state.

    Args:
        changed: is notified when one of them has something for the other one.
        state: returns the state, in the thread that trains.
        island: ranks of the island.

    Attributes:
        asked: True if the state is waited for.
        asks: how often it was asked for; equal on all ranks of the island, sooner or later.
    """

    def __init__(self, changed: threading.Condition, state: Callable[[], Mapping[str, object]], island: Island) -> None:
        self._changed = changed
        self._state = state
        self._island = island
        self._given: Any = None
        self.asks = 0
        self.asked = False

    def ask(self, check: Callable[[], None], needed: Callable[[], bool]) -> Mapping[str, object] | None:
        """The state, when it is there; None if no newcomer needs it any more. Collective in the island.

        Args:
            check: raises if this process leaves.
            needed: returns whether somebody waits for the state; asked of the first rank.
        """
        given: Any
        with self._changed:
            self.asks += 1
            self.asked = True
            self._changed.notify_all()
        if self._island.leads:
            self._wait(check, needed)
            self._island.spread(self._given is not None)
        elif self._island.spread():
            self._wait(check, lambda: True)
        with self._changed:
            given, self._given, self.asked = self._given, None, False
        if isinstance(given, BaseException):
            raise given
        told: Mapping[str, object] | None = given
        return told

    def _wait(self, check: Callable[[], None], needed: Callable[[], bool]) -> None:
        with self._changed:
            while self.asked:
                self._changed.wait(_LOOK_S)
                check()
                # A thread that makes no step for minutes must not make all wait, if another member gives the state.
                if not needed():
                    self.asked = False

    def answer(self, asks: int | None = None) -> None:
        """Copy the state for who has asked: training goes on while it is sent.

        Args:
            asks: number of the request that is meant; None for any.
        """
        given: Any
        with self._changed:
            asks = self.asks if asks is None else asks
            if not self.asked or asks != self.asks:
                return
        try:
            given = copy.deepcopy(self._state())
        except BaseException as error:  # noqa: BLE001 - the thread that asked ends with it, and then this one
            given = error
        with self._changed:
            if asks == self.asks and self.asked:
                self._given, self.asked = given, False
                self._changed.notify_all()
                return
        # It was for another newcomer, and is too old for this one. What a signal handler has raised is for this thread.
        if isinstance(given, BaseException) and not isinstance(given, Exception):
            raise given
