"""How long those who write records have been silent, judged by the beats of the records."""

from __future__ import annotations

from collections.abc import Mapping


class Silence:
    """The silence of others, as one process sees it.

    Only time during which this process itself was awake counts: after a machine has slept, everybody must have a chance
    to show up first.

    Args:
        beat_s: seconds between two beats of a record.

    Attributes:
        seconds: length of the silence of each, since this process first looked for its record. Another thread may read.

    Example:
        >>> silence = Silence(beat_s=1.0)
        >>> for now, beat in [(10.0, 7), (11.0, 7), (12.5, 7)]:
        ...     _ = silence.look({3: beat}, now)
        >>> silence.seconds
        {3: 2.5}
        >>> silence.look({3: 8}, 13.5)
        {3: 3.5}
        >>> silence.seconds
        {3: 0.0}
    """

    def __init__(self, beat_s: float) -> None:
        self.seconds: dict[int, float] = {}
        self._beat_s = beat_s
        self._beats: dict[int, int] = {}
        self._looked: float | None = None

    def look(self, beats: Mapping[int, int], now: float) -> dict[int, float]:
        """Take the beats of some records into account, and return the silences, in seconds, that have ended.

        Args:
            beats: beat of each record that was read.
            now: seconds on this process's clock.
        """
        since_s = 0.0 if self._looked is None else now - self._looked
        # A process that has not looked for so long was asleep, or its store is slow. It may be the first that wakes.
        awake_s = since_s if since_s <= 2 * self._beat_s else self._beat_s
        self._looked = now
        seconds, ended = dict(self.seconds), {}
        for writer, beat in beats.items():
            before = self._beats.get(writer)
            seconds[writer] = 0.0 if before is None else seconds[writer] + awake_s
            if before is not None and before != beat:
                ended[writer], seconds[writer] = seconds[writer], 0.0
            self._beats[writer] = beat
        self.seconds = seconds  # A new one: another thread may be reading the old one.
        return ended
