"""A sweep of bucket sizes while a model trains: the user measures, rank 0 decides, all ranks follow in the same step.

Ranks ask at the same step. Each posts what it measured to the store, and all read what rank 0 decides. Nothing of this
passes through the communicators of the model, so a rank that asks alone meets no message of another kind: it waits,
and then says for whom. Every layout is measured once: ten or twenty settings are fewer than a model of the scores
needs.
"""

from __future__ import annotations

import logging
import math
import statistics
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from bagua.buckets import Bucket
from bagua.comm import ProcessGroup, consult
from bagua.engine.formation import Formation
from bagua.engine.options import Setting
from bagua.engine.reducer import Reducer
from bagua.errors import BaguaError, CollectiveMismatchError, ConfigurationError

#: Powers of two that are tried as sizes of buckets: 1 KiB to 2 GiB.
POWERS = range(10, 32)
#: Settings that score at most so much below the best are measured again, until each has so many samples.
MARGIN, SAMPLES = 0.1, 3
_log = logging.getLogger("bagua.autotune")


class Sweep:
    """Measures each setting once, and the best ones again; a setting counts with the median of its samples.

    Args:
        settings: settings to choose from; the first is in force.

    Attributes:
        samples: scores of each setting; more is better.

    Example:
        >>> sweep = Sweep([Setting(2**power) for power in range(10, 14)])
        >>> while (setting := sweep.following()) is not None:
        ...     sweep.samples[setting].append(-abs(setting.bucket_bytes - 3000))
        >>> sweep.best
        Setting(bucket_bytes=2048, hierarchical=False)
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        self.samples: dict[Setting, list[float]] = {setting: [] for setting in settings}

    @property
    def best(self) -> Setting:
        """The setting with the highest median so far."""
        return max(self.samples, key=lambda one: statistics.median(self.samples[one] or [-math.inf]))

    def following(self) -> Setting | None:
        """The setting to measure next; None when the best one is known."""
        for setting, scores in self.samples.items():
            if not scores:
                return setting
        medians = {setting: statistics.median(scores) for setting, scores in self.samples.items()}
        least = max(medians.values()) - MARGIN * abs(max(medians.values()))
        rivals = [one for one in medians if medians[one] >= least and len(self.samples[one]) < SAMPLES]
        return min(rivals, key=lambda one: len(self.samples[one]), default=None)


class _Post(NamedTuple):
    """What a rank tells rank 0; the store holds it as a list."""

    step: int  # synchronized backward passes so far
    fresh: bool  # its buckets were formed by something else than tuning since it last asked
    score: float | None  # median of what its user reported for the setting in force


class Autotuner:
    """What one rank reports and asks.

    Args:
        reducer: reducer whose buckets are tuned.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._scores: list[float] = []
        self._asked = 0
        self._sweep: Sweep | None = None  # on rank 0 only
        #: Of the buckets that are measured the first; old buckets of a large model must not stay in memory.
        self._measured: weakref.ref[Bucket] | None = None
        self._final = False

    def report(self, scores: Sequence[float]) -> None:
        """Note scores of the setting in force.

        Args:
            scores: more is better.

        Raises:
            ConfigurationError: one of them is not a finite number.
        """
        values = [float(score) for score in scores]
        wrong = [value for value in values if not math.isfinite(value)]
        if wrong:
            raise ConfigurationError(
                "a score that cannot be compared",
                argument="score_record_list",
                expected="finite numbers, more is better",
                seen=", ".join(map(str, wrong)),
            )
        self._scores += values

    def ask(self) -> bool:
        """Let rank 0 decide, from what all ranks reported, and apply it. Collective, between two steps.

        Returns:
            Whether anything was changed.

        Raises:
            ConfigurationError: on all ranks, if some rank has reported nothing since it last asked.
            CollectiveMismatchError: on all ranks, if they ask at different steps.
            CollectiveTimeoutError: not all ranks ask.
        """
        reducer, group = self._reducer, self._reducer.group
        apart = reducer.formation.declaration.in_background  # Ranks that are not in the same step cannot agree on one.
        if group.size == 1 or apart or not reducer.buckets:
            return False
        fresh = self._measured is None or self._measured() is not reducer.buckets[0]
        if self._final and not fresh:
            return False
        score = statistics.median(self._scores) if self._scores else None
        self._asked += 1
        try:
            answer = consult(
                group.store, "autotune", self._asked, group.rank, group.ranks,
                _Post(reducer.step, fresh, score), self._decide, group.timeout_s,
            )  # fmt: skip
        except BaguaError as error:
            reducer.give_up(error)
            raise
        _refuse([_Post(*post) for post in answer["posts"]], group)
        self._scores = []
        return self._apply(Setting(*answer["setting"]), fresh=fresh, final=answer["final"])

    def _decide(self, posts: list[Any]) -> dict[str, Any]:
        """On rank 0: what all ranks do now, and the posts, in which each may find why there is nothing to do."""
        formation, told = self._reducer.formation, [_Post(*post) for post in posts]
        scores = [post.score for post in told if post.score is not None]
        setting, final = formation.setting, False
        if self._sweep is None or any(post.fresh for post in told):
            self._sweep = Sweep(settings_of(formation))  # What was measured before was measured with other buckets.
        elif len(scores) == len(told) and len({post.step for post in told}) == 1:
            self._sweep.samples[setting].append(statistics.fmean(scores))
            following = self._sweep.following()
            setting, final = following or self._sweep.best, following is None
            if final:
                _log.info("chose %s after %d samples", setting, sum(map(len, self._sweep.samples.values())))
        return {"posts": posts, "setting": list(setting), "final": final}

    def _apply(self, setting: Setting, *, fresh: bool, final: bool) -> bool:
        reducer = self._reducer
        changed = setting != reducer.formation.setting
        if changed or (fresh and not _as_cut(reducer.formation)):
            with reducer.giving_up():
                reducer.formation.recut(setting)
        self._measured, self._final = weakref.ref(reducer.buckets[0]), final
        return changed


def _refuse(posts: Sequence[_Post], group: ProcessGroup) -> None:
    """Raise, on all ranks, what is wrong with what one of them posted."""
    own = posts[group.rank].step
    other = next((rank for rank, post in enumerate(posts) if post.step != own), None)
    if other is not None:
        raise CollectiveMismatchError(
            "ranks ask for the next setting at different steps",
            rank=group.ranks[group.rank],
            call="ask_and_update_hyperparameters",
            peers=(group.ranks[other],),
            expected=f"step {own}",
            seen=f"step {posts[other].step}",
            advice="Ask on every rank after the same number of synchronized backward passes.",
        )
    missing = [rank for rank, post in enumerate(posts) if post.score is None]
    if missing:
        raise ConfigurationError(
            f"no score since the last question on ranks {', '.join(map(str, missing))}",
            argument="score_record_list",
            expected="report_metrics([...]) on every rank before ask_and_update_hyperparameters()",
            seen="none",
        )


def settings_of(formation: Formation) -> list[Setting]:
    """The setting in force, then all others that give other buckets, or the other form of the algorithm.

    Args:
        formation: formation that has buckets.
    """
    now = formation.setting
    size_of: dict[tuple[tuple[int, ...], ...], int] = {}
    for size in (now.bucket_bytes, *(2**power for power in POWERS)):
        size_of.setdefault(tuple(map(tuple, formation.layout(size))), size)
    forms = [now.hierarchical, *([not now.hierarchical] if _has_other_form(formation) else [])]
    found = [Setting(size, form) for form in forms for size in sorted(size_of.values())]
    return sorted(found, key=lambda one: one != now)


def _has_other_form(formation: Formation) -> bool:
    """Whether the algorithm can be made hierarchical, or flat, and goes on with the same state."""
    remembers = any(place.memory.state for place in formation.scheduler.places)
    if remembers or not formation.group.has_two_levels:
        return False
    try:
        other = formation.declaration.in_form(hierarchical=not formation.setting.hierarchical)
        other.reify(formation.algorithm.process_group)
    except ConfigurationError:
        return False
    return True


def _as_cut(formation: Formation) -> bool:
    """Whether the buckets are what their size makes of them, and not what a checkpoint brought."""
    names, wanted = formation.registration.names, formation.layout(formation.setting.bucket_bytes)
    return [[names[one] for one in bucket] for bucket in wanted] == [list(b.names) for b in formation.scheduler.buckets]
