"""What became of a run under faults, from what members said: pure arithmetic."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bagua.cli.chaos.progress import MemberProgress
from bagua.cli.chaos.schedule import Fault


@dataclass
class Life:
    """One process, or one job of a launcher, of a member.

    Attributes:
        started_s: when it was started.
        said: its progress.
        ended_s: when it ended; None while it runs.
        status: exit status; negative for a signal.
    """

    started_s: float
    said: list[MemberProgress] = field(default_factory=list)
    ended_s: float | None = None
    status: int | None = None


@dataclass
class Strike:
    """A fault that happened.

    Attributes:
        fault: the fault.
        member: member that it hit.
        at_s: when.
        what: description of the fault, in words.
        over_s: when it was lifted, or the killed member was started again; None before, or if its launcher does that.
    """

    fault: Fault
    member: int
    at_s: float
    what: str
    over_s: float | None = None


@dataclass
class History:
    """All that happened.

    Attributes:
        lives: lives of each member, in order.
        strikes: faults that happened, in order.
        skipped: faults that did not, and why.
        hangs: silences of all members, in words.
        problems: other things that went wrong, in words.
        begun_s: when the schedule began.
    """

    lives: list[list[Life]]
    strikes: list[Strike] = field(default_factory=list)
    skipped: list[tuple[Fault, str]] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    begun_s: float = 0.0

    def said(self) -> list[MemberProgress]:
        """Progress of all members, in order."""
        return sorted((one for lives in self.lives for life in lives for one in life.said), key=lambda one: one.at_s)

    def struck(self, member: int) -> list[Strike]:
        """Faults that hit ``member``."""
        return [strike for strike in self.strikes if strike.member == member]


def score(history: History, pace: float | None = None) -> dict[str, Any]:
    """The figures of a run.

    Args:
        history: events of the run.
        pace: steps in a second of a member on its own; None for the median of what the members showed between faults.
    """
    said = history.said()
    shown = [one for member, _ in enumerate(history.lives) for one in _paces(history, member)]
    pace = pace or (statistics.median(shown) if shown else None)
    wrong = _different(said)
    return {
        "committed_steps": max((one.step for one in said), default=0),
        "commits": len({one.step for one in said}),
        "pace_steps_per_s": pace,
        **_goodput(history, pace),
        **_counts(said),
        "faults": [_recovery(history, strike) for strike in history.strikes],
        "skipped": [{"at_s": fault.at_s, "kind": fault.kind, "why": why} for fault, why in history.skipped],
        "restarts": sum(len(lives) - 1 for lives in history.lives),
        "digests": len({one.step for one in said if one.digest}),
        "different_digests": wrong,
        "hangs": history.hangs,
        "problems": history.problems,
    }


def _different(said: Iterable[MemberProgress]) -> dict[str, dict[str, list[int]]]:
    """Who has which digest, for each step after which not all have the same."""
    by_step: dict[int, dict[str, set[int]]] = {}
    for one in said:
        if one.digest:
            by_step.setdefault(one.step, {}).setdefault(one.digest, set()).add(one.member)
    return {
        str(step): {digest: sorted(members) for digest, members in digests.items()}
        for step, digests in by_step.items()
        if len(digests) > 1
    }


def _counts(said: Sequence[MemberProgress]) -> dict[str, float | None]:
    """Means of what members count, over all that they said."""
    whole = [one for one in said if one.alive and one.contributed is not None]
    found: dict[str, float | None] = {}
    for name in ("alive", "in_epoch", "contributed"):
        values = [value for one in said if (value := getattr(one, name)) is not None]
        found[name] = statistics.fmean(values) if values else None
    shares = [one.contributed / one.alive for one in whole if one.contributed is not None and one.alive]
    found["contributed_of_alive"] = statistics.fmean(shares) if shares else None
    return found


def _told_once(life: Life) -> list[MemberProgress]:
    """Its progress without words that repeat a step, as those of logs do."""
    return [one for number, one in enumerate(life.said) if not number or one.step != life.said[number - 1].step]


def _disturbed(history: History, member: int, begin_s: float, end_s: float) -> bool:
    """Whether a fault of its own hit the member between two times."""
    return any(
        strike.at_s <= end_s and begin_s <= (strike.at_s if strike.over_s is None else strike.over_s)
        for strike in history.struck(member)
    )


def _paces(history: History, member: int) -> list[float]:
    """Steps in a second between any two words of a member, where no fault hit it."""
    return [
        (after.step - before.step) / (after.at_s - before.at_s)
        for life in history.lives[member]
        for before, after in pairwise(_told_once(life))
        if after.step > before.step
        and after.at_s > before.at_s
        and not _disturbed(history, member, before.at_s, after.at_s)
    ]


@dataclass(frozen=True)
class _Stretch:
    """Between two words of one life: new steps, which are those that the member had never made before."""

    begin_s: float
    end_s: float
    steps: int


def _stretches(lives: Iterable[Life]) -> Iterator[_Stretch]:
    highest = 0
    for life in lives:
        for before, after in pairwise(_told_once(life)):
            yield _Stretch(before.at_s, after.at_s, max(0, after.step - max(before.step, highest)))
            highest = max(highest, before.step, after.step)
        highest = max([highest, *(one.step for one in life.said)])


def _goodput(history: History, pace: float | None) -> dict[str, float | None]:
    """New steps: over what all members would make undisturbed, and over what they make while they are well.

    A member is well from its first word on, but for the time in which a fault of its own is upon it. The steps that it
    had made when it was killed are lost, and their time counts.
    """
    made, made_well, well_s = 0, 0, 0.0
    for member, lives in enumerate(history.lives):
        for one in _stretches(lives):
            made += one.steps if one.begin_s >= history.begun_s else 0
            if not _disturbed(history, member, one.begin_s, one.end_s):
                made_well += one.steps
                well_s += one.end_s - one.begin_s
        for life in lives:
            kills = [strike for strike in history.struck(member) if _ended_by(life, strike)]
            well_s += sum(strike.at_s - life.said[-1].at_s for strike in kills if life.said)
    whole_s = (max((one.at_s for one in history.said()), default=0.0) - history.begun_s) * len(history.lives)
    return {
        "goodput": None if pace is None or whole_s <= 0 else made / (pace * whole_s),
        "goodput_while_well": None if pace is None or well_s <= 0 else made_well / (pace * well_s),
    }


def _ended_by(life: Life, strike: Strike) -> bool:
    kill = strike.fault.kind == "kill" and life.started_s <= strike.at_s
    return kill and life.ended_s is not None and 0 <= life.ended_s - strike.at_s < 1.0


def _recovery(history: History, strike: Strike) -> dict[str, Any]:
    """How long the others and the member itself were held up by one fault."""
    late = [
        one
        for member, _ in enumerate(history.lives)
        if member != strike.member and (one := _late_s(history, member, strike)) is not None
    ]
    return {
        "at_s": strike.at_s,
        "kind": strike.fault.kind,
        "member": strike.member,
        "what": strike.what,
        "lasted_s": None if strike.over_s is None else strike.over_s - strike.at_s,
        "late_s": max(late) if late else None,
        "back_s": _back_s(history, strike),
    }


def _back_s(history: History, strike: Strike) -> float | None:
    """From the end of the fault to the next word of the member; of a killed one, from its next start.

    A launcher that starts a killed rank again says nothing of it: then from the kill to the new step that took longest
    of the next two. The first may have been about to be told.
    """
    own = history.lives[strike.member]
    if strike.over_s is not None:
        said = [one.at_s for life in own for one in life.said if one.at_s > strike.over_s]
        return said[0] - strike.over_s if said else None
    next_two = [one for one in _new_steps(own) if one.end_s > strike.at_s][:2]
    if len(next_two) < 2 or any(_ended_by(life, strike) for life in own):
        return None
    return max(next_two, key=lambda one: one.end_s - one.begin_s).end_s - strike.at_s


def _new_steps(lives: Iterable[Life]) -> list[_Stretch]:
    """From each word that tells a new step to the next one that does, over all lives."""
    found: list[MemberProgress] = []
    for one in (one for life in lives for one in life.said):
        if not found or one.step > found[-1].step:
            found.append(one)
    return [_Stretch(before.at_s, after.at_s, after.step - before.step) for before, after in pairwise(found)]


def _late_s(history: History, member: int, strike: Strike) -> float | None:
    """How much longer than usual another member took for the step that it was in, or for the one after it.

    If it had just finished a step together with the one that was hit, only the one after it suffers.
    """
    stretches = _new_steps(history.lives[member])
    held_up = [one for one in stretches if one.end_s >= strike.at_s][:2]
    if not held_up or held_up[0].begin_s > strike.at_s:
        return None
    if _disturbed(history, member, held_up[0].begin_s, held_up[-1].end_s):
        return None
    usual_s = statistics.median(one.end_s - one.begin_s for one in stretches)
    return max(0.0, max(one.end_s - one.begin_s for one in held_up) - usual_s)
