"""Tuning during training, as each rank takes part in it.

Ranks ask at the same step. Each posts what it measured to the store; rank 0 decides; all
read the decision and apply it before they go on. Nothing of this passes through the
communicators of the model, so a rank that asks alone meets no message of another kind:
it waits, and then says for whom.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from bagua.buckets import Bucket
from bagua.comm import ProcessGroup, consult
from bagua.engine.autotune.director import Decision, Director, Report
from bagua.engine.autotune.search import Setting
from bagua.engine.autotune.settings import TuningMode
from bagua.engine.formation import Formation
from bagua.engine.reducer import Reducer
from bagua.errors import BaguaError, CollectiveMismatchError, ConfigurationError
from bagua.primitives import has_two_levels

#: The engine asks for the first time after so many forward passes, when the first buckets have settled.
FIRST_PAUSE_STEPS = 5
#: Powers of two that are tried as sizes of buckets: 1 KiB to 2 GiB.
POWERS = range(10, 32)


class Stopwatch:
    """Seconds of whole training steps, from one training forward pass to that of the next step.

    A step in which the module was evaluated, and the first one after ``restart``, do not count.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step = -1
        self._began_s = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget what was measured; the step under way does not count."""
        self.total_s = 0.0
        self.steps = 0
        self._counts = False

    def interrupt(self) -> None:
        """Something else than training happens: the step under way does not count."""
        self._counts = False

    def forward(self, step: int) -> bool:
        """A training forward pass begins, after ``step`` backward passes; whether it is the first of its step."""
        if step == self._step:
            return False
        now_s = self._clock()
        if self._counts and step == self._step + 1:
            self.total_s += now_s - self._began_s
            self.steps += 1
        self._step = step
        self._began_s = now_s
        self._counts = True
        return True

    @property
    def speed(self) -> float | None:
        """Steps per second; None before the first that counts, or if the clock has not moved."""
        return self.steps / self.total_s if self.total_s else None


class Autotuner:
    """Measures, asks rank 0, and applies the answer.

    Args:
        reducer: reducer whose settings are tuned.
        clock: seconds.

    Attributes:
        automatic: True if training forward passes are timed, and ask by themselves. The first ``report`` turns that
            off: from then on the caller measures and asks.
    """

    def __init__(self, reducer: Reducer, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reducer = reducer
        apart = reducer.algorithm.plane is not None  # ranks that are not in the same step cannot agree on one
        self._possible = reducer.options.tuning[0] is not TuningMode.Off and reducer.group.size > 1 and not apart
        self.automatic = self._possible and reducer.options.tuning[0] is TuningMode.Automatic
        self._director = Director(reducer.options.tuning[1], clock) if reducer.group.rank == 0 else None
        self._watch = Stopwatch(clock)
        self._scores: list[float] = []
        self._asked = 0
        self._pause_steps = FIRST_PAUSE_STEPS
        self._final = False
        self._measured: list[Bucket] | None = None

    # What the engine measures.

    def forward(self, *, training: bool) -> None:
        """A forward pass of the module begins; ask if it is time to."""
        if self.settled:
            return
        if not training:
            self._watch.interrupt()
        elif self._watch.forward(self._reducer.step):
            self._pause_steps -= 1
            if self._pause_steps <= 0:
                self._ask(self._watch.speed, manual=False)
                self._watch.interrupt()  # Asking is no part of a step.

    @property
    def settled(self) -> bool:
        """Whether the final choice was made for the buckets that there are now."""
        return self._final and self._measured is self._reducer.buckets

    # What a user measures.

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
        if self.automatic:  # Scores of another kind were compared so far.
            self.automatic = False
            self._measured = None
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
        if not self._possible or self.settled:
            return False
        return self._ask(statistics.median(self._scores) if self._scores else None, manual=True)

    # Both.

    def _ask(self, score: float | None, *, manual: bool) -> bool:
        reducer, group = self._reducer, self._reducer.group
        fresh = self._measured is not reducer.buckets
        report = Report(reducer.step, fresh=fresh, formed=bool(reducer.buckets), manual=manual, score=score)
        self._asked += 1
        try:
            answer = consult(
                group.store, "autotune", self._asked, group.rank, group.ranks,
                asdict(report), self._answer, group.timeout_s,
            )  # fmt: skip
        except BaguaError as error:
            reducer.give_up(error)
            raise
        return self._apply(Decision(**answer), fresh=fresh)

    def _answer(self, posts: list[dict[str, Any]]) -> dict[str, Any]:
        assert self._director is not None  # only rank 0 is asked
        formation = self._reducer.formation
        _, settings = formation.options.tuning
        return self._director.answer(
            posts, formation.setting, lambda: ladders_of(formation, tune_hierarchical=settings.tune_hierarchical)
        )

    def _apply(self, decision: Decision, *, fresh: bool) -> bool:
        reducer = self._reducer
        refusal = _refusal(decision, reducer.group)
        if refusal is not None:
            raise refusal
        self._pause_steps = decision.pause_steps
        if decision.restart:
            self._watch.restart()
            self._scores = []
        changed = decision.setting != reducer.formation.setting
        if reducer.buckets and (changed or (fresh and not _as_cut(reducer.formation))):
            try:
                reducer.formation.recut(decision.setting)
            except BaseException as error:
                reducer.give_up(error)
                raise
        self._measured = reducer.buckets
        self._final = decision.final
        return changed


def _refusal(decision: Decision, group: ProcessGroup) -> BaguaError | None:
    """The error that all ranks raise; None if there is a decision."""
    if decision.steps:
        own = decision.steps[group.rank]
        other = next(other for other, step in enumerate(decision.steps) if step != own)
        return CollectiveMismatchError(
            "ranks ask for the next setting at different steps",
            rank=group.ranks[group.rank],
            call="ask_and_update_hyperparameters",
            peers=(group.ranks[other],),
            expected=f"step {own}",
            seen=f"step {decision.steps[other]}",
            advice="Ask on every rank after the same number of synchronized backward passes.",
        )
    if decision.missing:
        return ConfigurationError(
            f"no score since the last question on ranks {', '.join(map(str, decision.missing))}",
            argument="score_record_list",
            expected="report_metrics([...]) on every rank before ask_and_update_hyperparameters()",
            seen="none",
        )
    if decision.failure:
        return ConfigurationError(
            f"rank 0 could not decide on the next setting: {decision.failure}", argument="autotune"
        )
    return None


def ladders_of(formation: Formation, *, tune_hierarchical: bool) -> list[list[Setting]]:
    """What there is to choose from: for each form of the algorithm, the sizes that give different buckets.

    Args:
        formation: formation that has buckets.
        tune_hierarchical: try the other form, too, where there is one.
    """
    now = formation.setting
    size_of: dict[tuple[tuple[int, ...], ...], int] = {}
    for size in (now.bucket_bytes, *(2**power for power in POWERS)):
        size_of.setdefault(tuple(map(tuple, formation.layout(size))), size)
    forms = [now.hierarchical]
    if tune_hierarchical and _has_other_form(formation):
        forms.append(not now.hierarchical)
    return [[Setting(size, form) for size in sorted(size_of.values())] for form in forms]


def _has_other_form(formation: Formation) -> bool:
    """Whether the algorithm can be made hierarchical, or flat, and goes on with the same state."""
    if not has_two_levels(formation.group) or formation.execution.remembers:
        return False
    try:
        other = formation.declaration.in_form(hierarchical=not formation.setting.hierarchical)
        other.reify(formation.algorithm.process_group)
    except ConfigurationError:
        return False
    return True


def _as_cut(formation: Formation) -> bool:
    """Whether the buckets are what their size makes of them, and not what a checkpoint brought."""
    wanted = [
        [formation.registration.names[position] for position in bucket]
        for bucket in formation.layout(formation.setting.bucket_bytes)
    ]
    return wanted == [list(bucket.names) for bucket in formation.execution.buckets]
