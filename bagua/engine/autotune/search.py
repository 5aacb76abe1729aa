"""Which setting to measure next, and which is the best so far: pure bookkeeping, without clock or communication."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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


def next_of_the_grid(search: Search) -> Setting | None:
    """The setting in force, then every other one if samples suffice, else every second, third, ... of each ladder."""
    # A third of the samples is kept, to measure the best ones again.
    affordable = max(2 * search.max_samples // 3, 1)
    stride = math.ceil(sum(map(len, search.ladders)) / affordable)
    # Both ends, which is where a ladder is worst or best most often.
    grid = [setting for ladder in search.ladders for setting in sorted({*ladder[::stride], ladder[-1]})]
    return next((setting for setting in (search.start, *grid) if setting not in search.samples), None)


@dataclass
class Search:
    """Proposes settings, is told their scores, and ends with a choice.

    First it explores. Then the best settings and the neighbours of the very best are measured
    again, in turn, until each has ``REPEATS`` samples. A setting counts with the median of its
    samples, so neither a lucky sample nor an interrupted one decides.

    Args:
        ladders: for each form of the algorithm, its settings by size. None may be empty.
        start: the setting in force; one of these.
        max_samples: proposals at most.
        explore: function that returns the next setting while exploring; None when enough has been seen.

    Attributes:
        samples: scores by setting, in the order in which they were told.

    Example:
        >>> ladder = [Setting(2**power) for power in range(10, 14)]
        >>> search = Search([ladder], ladder[0], max_samples=20)
        >>> while (setting := search.ask()) is not None:
        ...     search.tell(setting, score=-abs(setting.bucket_bytes - 3000))
        >>> search.best
        Setting(bucket_bytes=2048, hierarchical=False)
    """

    ladders: Sequence[Sequence[Setting]]
    start: Setting
    max_samples: int
    explore: Callable[[Search], Setting | None] = next_of_the_grid
    samples: dict[Setting, list[float]] = field(default_factory=dict)

    def tell(self, setting: Setting, score: float) -> None:
        """Note a sample: more is better, and the number is finite."""
        self.samples.setdefault(setting, []).append(score)

    def ask(self) -> Setting | None:
        """The setting to measure next; None when there is nothing left to find out."""
        if self.taken >= self.max_samples:
            return None
        return self.explore(self) or self._confirm()

    @property
    def taken(self) -> int:
        """Samples so far."""
        return sum(map(len, self.samples.values()))

    @property
    def best(self) -> Setting:
        """The setting with the highest median score; before the first sample the one in force."""
        medians = self._medians()
        return max(medians, key=medians.__getitem__, default=self.start)

    def place(self, setting: Setting) -> tuple[int, int]:
        """The ladder of a setting, and its place there."""
        form = next(number for number, ladder in enumerate(self.ladders) if setting in ladder)
        return form, self.ladders[form].index(setting)

    def _medians(self) -> dict[Setting, float]:
        return {setting: statistics.median(scores) for setting, scores in self.samples.items()}

    def _confirm(self) -> Setting | None:
        medians = self._medians()
        highest = max(medians.values())
        least = highest - MARGIN * abs(highest)
        rivals = sorted((s for s, score in medians.items() if score >= least), key=lambda s: -medians[s])
        # The neighbours, too: they may not have been explored, or an interruption spoiled their only sample.
        short = [one for one in (*rivals, *self._neighbours(self.best)) if len(self.samples.get(one, ())) < REPEATS]
        return min(short, key=lambda setting: len(self.samples.get(setting, ())), default=None)

    def _neighbours(self, setting: Setting) -> list[Setting]:
        """The next smaller and larger size, and the same size in other forms."""
        form, place = self.place(setting)
        own = self.ladders[form]
        others = [ladder[place] for ladder in self.ladders if ladder is not own and place < len(ladder)]
        return [*own[max(place - 1, 0) : place], *own[place + 1 : place + 2], *others]


def optuna_search(ladders: Sequence[Sequence[Setting]], start: Setting, max_samples: int) -> Search:
    """A search that lets optuna's tree-structured Parzen estimator propose, for half of the samples."""
    optuna = importlib.import_module("optuna")
    said = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # It would announce the study on stderr.
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    optuna.logging.set_verbosity(said)
    asked: list[tuple[Any, Setting]] = []

    def propose(search: Search) -> Setting | None:
        if asked:
            trial, setting = asked.pop()
            study.tell(trial, search.samples[setting][-1])
        if search.taken >= max(max_samples // 2, 1):
            return None
        trial = study.ask()
        ladder = ladders[trial.suggest_categorical("form", list(range(len(ladders))))]
        place: int = trial.suggest_int("place", 0, max(map(len, ladders)) - 1)
        asked.append((trial, ladder[min(place, len(ladder) - 1)]))
        return asked[-1][1]

    search = Search(ladders, start, max_samples, propose)
    study.enqueue_trial(dict(zip(("form", "place"), search.place(start), strict=True)))
    return search
