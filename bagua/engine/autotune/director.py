"""Rank 0's part of tuning: it keeps the clock, the samples and the log, and decides for all ranks."""

from __future__ import annotations

import csv
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagua.engine.autotune.search import Search, Setting, optuna_search
from bagua.engine.autotune.settings import AutotuneSettings

_log = logging.getLogger("bagua.autotune")
#: An automatic sample has so many steps at least, and a look at the clock comes no later than after so many.
LEAST_STEPS = 3
MOST_STEPS = 1000
COLUMNS = ("train_iter", "bucket_bytes", "is_hierarchical_reduce", "score", "final")

Ladders = Sequence[Sequence[Setting]]


@dataclass(frozen=True)
class Report:
    """What a rank has seen since it last asked; the store holds it as a dictionary."""

    step: int  # synchronized backward passes so far
    fresh: bool  # its buckets were formed by something else than tuning since then
    formed: bool  # it has buckets
    manual: bool = False  # its user measures, so a score is due; otherwise the engine, in steps per second
    score: float | None = None  # more is better


@dataclass(frozen=True)
class Decision:
    """What all ranks do now; the store holds it as a dictionary. After one of the last three the rest means nothing."""

    bucket_bytes: int = 0  # the setting to use from now on
    hierarchical: bool = False
    restart: bool = False  # measurements so far say nothing about it
    final: bool = False  # this is the choice; there is nothing more to ask
    pause_steps: int = LEAST_STEPS + 1  # the engine asks again after so many
    steps: Sequence[int] = ()  # of the ranks, where they differ
    missing: Sequence[int] = ()  # ranks without a score that should have one
    failure: str = ""  # why rank 0 could not decide

    @property
    def setting(self) -> Setting:
        """What is to be used."""
        return Setting(self.bucket_bytes, self.hierarchical)


class Director:
    """Decides, from what all ranks report, which setting all of them use next.

    Args:
        settings: settings of the user.
        clock: seconds, for the warm-up and the time that a sample takes.
    """

    def __init__(self, settings: AutotuneSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._warm_at = clock() + settings.warmup_time_s
        self._since = -math.inf
        self._search: Search | None = None
        self._current = Setting(0)

    def answer(self, posts: Sequence[dict[str, Any]], start: Setting, ladders: Callable[[], Ladders]) -> dict[str, Any]:
        """A ``Decision``, or why there is none, as a dictionary.

        Args:
            posts: a ``Report`` of each rank, as dictionaries.
            start: the setting in force.
            ladders: function that returns the values to choose from, in case they are not known yet.
        """
        try:
            decision = self._decide([Report(**post) for post in posts], start, ladders)
        except Exception as error:  # noqa: BLE001 - every rank raises it, this one too
            decision = Decision(failure=f"{type(error).__name__}: {error}")
        return asdict(decision)

    def _decide(self, reports: Sequence[Report], start: Setting, ladders: Callable[[], Ladders]) -> Decision:
        steps = [report.step for report in reports]
        missing = [rank for rank, report in enumerate(reports) if report.manual and report.score is None]
        if len(set(steps)) > 1 or missing:
            return Decision(steps=steps if len(set(steps)) > 1 else (), missing=missing)
        if any(report.fresh or not report.formed for report in reports):
            self._search = None
        if not all(report.formed for report in reports):
            return self._hold(start, reports, restart=True)
        if self._search is None:
            return self._begin(start, ladders(), reports)
        return self._go_on(self._search, steps[0], reports)

    def _begin(self, start: Setting, ladders: Ladders, reports: Sequence[Report]) -> Decision:
        kind = optuna_search if self._settings.search == "optuna" else Search
        self._search = kind(ladders, start, self._settings.max_samples)
        self._current = start
        self._since = self._clock()
        if sum(map(len, ladders)) == 1:
            return Decision(start.bucket_bytes, start.hierarchical, final=True)
        return self._hold(start, reports, restart=True)

    def _go_on(self, search: Search, step: int, reports: Sequence[Report]) -> Decision:
        now = self._clock()
        if now < self._warm_at or self._since < self._warm_at:
            self._since = now
            return self._hold(self._current, reports, restart=True)
        scores = [report.score for report in reports if report.score is not None]
        if not scores or now - self._since < self._settings.sampling_confidence_time_s:
            return self._hold(self._current, reports)
        return self._sample(search, step, statistics.fmean(scores))

    def _hold(self, setting: Setting, reports: Sequence[Report], *, restart: bool = False) -> Decision:
        """Go on as it is, for about as long as the warm-up or the sample still takes."""
        left_s = max(self._warm_at, self._since + self._settings.sampling_confidence_time_s) - self._clock()
        speeds = [report.score for report in reports if report.score and not report.manual]
        wanted = math.ceil(left_s * min(speeds)) if speeds and left_s > 0 else 0
        pause = min(max(wanted, LEAST_STEPS + 1), MOST_STEPS)
        return Decision(setting.bucket_bytes, setting.hierarchical, restart=restart, pause_steps=pause)

    def _sample(self, search: Search, step: int, score: float) -> Decision:
        self._write(step, self._current, score)
        search.tell(self._current, score)
        following = search.ask()
        self._current = following or search.best
        self._since = self._clock()
        if following is None:
            best = statistics.median(search.samples[search.best])
            self._write(step, search.best, best, final=True)
            _log.info("chose %s after %d samples, score %.6g", search.best, search.taken, best)
        return Decision(self._current.bucket_bytes, self._current.hierarchical, restart=True, final=following is None)

    def _write(self, step: int, setting: Setting, score: float, *, final: bool = False) -> None:
        if self._settings.log_file is None:
            return
        path = Path(self._settings.log_file)
        new = not path.exists() or path.stat().st_size == 0
        with path.open("a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(COLUMNS)
            writer.writerow([step, setting.bucket_bytes, int(setting.hierarchical), repr(score), int(final)])
