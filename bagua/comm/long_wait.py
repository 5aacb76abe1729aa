"""When somebody who waits should say so: after half a minute, and then at growing intervals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from bagua.errors import CommunicationError

_log = logging.getLogger("bagua")

#: Seconds of waiting before the first warning; each further one comes after twice the time.
FIRST_WARNING_S = 30.0
#: Seconds between two looks whether the wait will ever end, from the first warning on.
LOOK_S = 1.0
Judge = Callable[[], CommunicationError | None]


class Activity:
    """What the calls of a communicator are made for, in words: for the messages of those who wait, and of errors.

    Attributes:
        describe: returns the words; None as long as none were given.
    """

    __slots__ = ("describe",)

    def __init__(self) -> None:
        self.describe: Callable[[], str] | None = None

    def __str__(self) -> str:
        return "" if self.describe is None else self.describe()


class LongWait:
    """Warns while somebody waits for long.

    Args:
        clock: seconds that pass.
        judge: the error if this rank waits forever; None if that is not known.

    Example:
        >>> seconds = iter([0.0, 29.0, 31.0, 59.0, 61.0])
        >>> wait = LongWait(lambda: next(seconds))
        >>> [wait.is_over() for _ in range(4)]
        [False, True, False, True]
    """

    __slots__ = ("_began", "_clock", "_judge", "_look_s", "_next_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic, judge: Judge | None = None) -> None:
        self._clock = clock
        self._judge = judge
        self._began = clock()
        self._next_s = self._look_s = FIRST_WARNING_S

    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._began

    def is_over(self) -> bool:
        """Whether it is time for a warning; then the next one is due after twice the time."""
        if self.waited_s() < self._next_s:
            return False
        self._next_s *= 2
        return True

    def trouble(self) -> CommunicationError | None:
        """The error if the wait never ends, as far as that can be told by now."""
        if self._judge is None or self.waited_s() < self._look_s:
            return None
        trouble = self._judge()
        self._look_s = self.waited_s() + LOOK_S
        return trouble

    def warn(self, rank: int, others: Sequence[int], where: str) -> None:
        """Log that ``rank`` waits for ``others``, and where."""
        named = f"rank{'s' if len(others) != 1 else ''} {', '.join(map(str, others))}"
        _log.warning("rank %d has waited %.0f s for %s %s", rank, self.waited_s(), named, where)
