"""Which setting to measure next, and which is the best so far: pure bookkeeping, without clock or communication."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Search", "Setting", "SweepSearch"]

#: A setting that scores so much below the best may be the best all the same: one sample is not exact.
MARGIN = 0.1
#: Samples of the best setting and of its rivals, before one of them is chosen.
REPEATS = 3


@dataclass(frozen=True, order=True)
class Setting:
    """What is tuned.

    Args:
        bucket_bytes: a bucket is closed when it holds so many bytes.
        hierarchical: inside each host first, then between hosts.
    """

    bucket_bytes: int
    hierarchical: bool = False


@dataclass
class Search(ABC):
    """Proposes settings, is told their scores, and ends with a choice.

    First it explores, in a way of its own. Then the best settings and the neighbours of the
    very best are measured again, in turn, until each has ``REPEATS`` samples. A setting
    counts with the median of its samples, so neither a lucky sample nor an interrupted one
    decides.

    Args:
        ladders: for each form of the algorithm, its settings by size. None may be empty.
        start: the setting in force; one of these.
        max_samples: proposals at most.

    Attributes:
        samples: scores by setting, in the order in which they were told.
    """

    ladders: Sequence[Sequence[Setting]]
    start: Setting
    max_samples: int
    samples: dict[Setting, list[float]] = field(default_factory=dict)

    def tell(self, setting: Setting, score: float) -> None:
        """Note a sample.

        Args:
            setting: setting that was measured.
            score: more is better; a finite number.
        """
        self.samples.setdefault(setting, []).append(score)

    def ask(self) -> Setting | None:
        """The setting to measure next; None when there is nothing left to find out."""
        if self.taken >= self.max_samples:
            return None
        return self.explore() or self._confirm()

    @abstractmethod
    def explore(self) -> Setting | None:
        """The next setting while exploring; None when enough has been seen."""

    @property
    def taken(self) -> int:
        """Samples so far."""
        return sum(map(len, self.samples.values()))

    @property
    def best(self) -> Setting:
        """The setting with the highest median score; before the first sample the one in force."""
        if not self.samples:
            return self.start
        return max(self.samples, key=lambda setting: statistics.median(self.samples[setting]))

    def _confirm(self) -> Setting | None:
        # The neighbours, too: they may not have been explored, or an interruption spoiled their only sample.
        doubtful = [*self.rivals(), *self.neighbours(self.best)]
        short = [setting for setting in doubtful if len(self.samples.get(setting, ())) < REPEATS]
        return min(short, key=lambda setting: len(self.samples.get(setting, ())), default=None)

    def rivals(self) -> list[Setting]:
        """Settings that may be the best, likeliest first."""
        medians = {setting: statistics.median(scores) for setting, scores in self.samples.items()}
        highest = max(medians.values())
        least = highest - MARGIN * abs(highest)
        return sorted((s for s, score in medians.items() if score >= least), key=lambda s: -medians[s])

    def neighbours(self, setting: Setting) -> list[Setting]:
        """The next smaller and larger size, and the same size in other forms."""
        form = next(number for number, ladder in enumerate(self.ladders) if setting in ladder)
        own, place = self.ladders[form], self.ladders[form].index(setting)
        others = [ladder[place] for ladder in self.ladders if ladder is not own and place < len(ladder)]
        return [*own[max(place - 1, 0) : place], *own[place + 1 : place + 2], *others]


class SweepSearch(Search):
    """Measures every setting once if samples suffice, else every second, third, ... on each ladder.

    Example:
        >>> ladder = [Setting(2**power) for power in range(10, 14)]
        >>> search = SweepSearch([ladder], ladder[0], max_samples=20)
        >>> while (setting := search.ask()) is not None:
        ...     search.tell(setting, score=-abs(setting.bucket_bytes - 3000))
        >>> search.best
        Setting(bucket_bytes=2048, hierarchical=False)
    """

    def explore(self) -> Setting | None:
        """The one in force, then the others of the grid."""
        return next((setting for setting in (self.start, *self._grid()) if setting not in self.samples), None)

    def _grid(self) -> list[Setting]:
        # A third of the samples is kept, to measure the best ones again.
        affordable = max(2 * self.max_samples // 3, 1)
        stride = math.ceil(sum(map(len, self.ladders)) / affordable)
        # Both ends, which is where a ladder is worst or best most often.
        return [setting for ladder in self.ladders for setting in sorted({*ladder[::stride], ladder[-1]})]
