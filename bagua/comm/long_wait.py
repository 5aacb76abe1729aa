"""When somebody who waits should say so: after half a minute, and then at growing intervals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["FIRST_WARNING_S", "LongWait"]

_log = logging.getLogger("bagua")

#: Seconds of waiting before the first warning; each further one comes after twice the time.
FIRST_WARNING_S = 30.0


class LongWait:
    """Warns while somebody waits for long.

    Args:
        clock: seconds that pass.
        first_s: seconds before the first warning.

    Example:
        >>> seconds = iter([0.0, 29.0, 31.0, 59.0, 61.0])
        >>> wait = LongWait(lambda: next(seconds))
        >>> [wait.is_over() for _ in range(4)]
        [False, True, False, True]
    """

    __slots__ = ("_began", "_clock", "_next_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic, first_s: float | None = None) -> None:
        self._clock = clock
        self._began = clock()
        self._next_s = FIRST_WARNING_S if first_s is None else first_s

    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return self._clock() - self._began

    def is_over(self) -> bool:
        """Whether it is time for a warning; then the next one is due after twice the time."""
        if self.waited_s() < self._next_s:
            return False
        self._next_s *= 2
        return True

    def warn(self, rank: int, what: str) -> None:
        """Log that ``rank`` waits for ``what``."""
        _log.warning("rank %d has waited %.0f s for %s", rank, self.waited_s(), what)
