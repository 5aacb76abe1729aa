"""How long something may take that happens again and again, from how long it took before."""

from __future__ import annotations

from collections import deque
from statistics import median

_KEPT, _FIRST = 64, 8
_DEVIATIONS, _TIMES_FIRST = 8.0, 3.0


class PhaseDeadline:
    """A deadline that follows what was measured: median and 8 median absolute deviations of the last 64 durations.

    It is at least 3 times the median of the first 8, which a lucky series of short ones must not undercut.

    Args:
        most_s: largest deadline, and that of the first time, in seconds: what the user allows.
        least_s: smallest deadline, in seconds.

    Attributes:
        most_s: the largest deadline, in seconds.

    Example:
        >>> deadline = PhaseDeadline(60.0)
        >>> deadline.seconds
        60.0
        >>> for duration_s in (2.0, 2.1, 1.9):
        ...     deadline.note(duration_s)
        >>> deadline.seconds
        6.0
    """

    def __init__(self, most_s: float, least_s: float = 1.0) -> None:
        self.most_s = most_s
        self._least_s = min(least_s, most_s)
        self._durations: deque[float] = deque(maxlen=_KEPT)
        self._first: list[float] = []

    def note(self, duration_s: float) -> None:
        """It has happened once more, and took so many seconds."""
        self._durations.append(duration_s)
        if len(self._first) < _FIRST:
            self._first.append(duration_s)

    def forget(self) -> None:
        """It has failed, perhaps because it was given too little time: begin again with the largest deadline."""
        self._durations.clear()
        self._first.clear()

    @property
    def seconds(self) -> float:
        """Seconds that it may take the next time."""
        if not self._durations:
            return self.most_s
        return min(max(self.usual_s, _TIMES_FIRST * median(self._first), self._least_s), self.most_s)

    @property
    def known(self) -> bool:
        """Whether it has happened often enough to tell what is usual."""
        return len(self._first) == _FIRST

    @property
    def usual_s(self) -> float:
        """Seconds that it takes at most, but for outliers: median and deviations alone; 0 before the first."""
        durations = list(self._durations)
        middle = median(durations) if durations else 0.0
        return middle + _DEVIATIONS * median([abs(duration - middle) for duration in durations] or [0.0])
