"""Which faults happen when, as a value: a seed gives the same schedule anywhere."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: What can happen to a member, in the order of the documentation.
KINDS = ("kill", "stop", "partition", "slow", "disk")
_NO_CLOCK = (
    "clocks do not jump: the clock of the machine belongs to all of its processes, and libfaketime 0.9, which gives "
    "processes another one, makes time.sleep of Python fail"
)
_SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0}
#: What happens near the end would leave no time to see the recovery: this part of the run, but no more seconds.
_LAST_PART, _LAST_S = 0.1, 20.0


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at_s: seconds from the beginning.
        kind: one of ``KINDS``.
        members: whom it hits: the first of these that is well.
        lasting_s: seconds until it is lifted; 0 for a kill, which is for good.
        draw: from 0 to 1. It chooses what is left to choose: one rank of the member.
    """

    at_s: float
    kind: str
    members: tuple[int, ...]
    lasting_s: float
    draw: float


@dataclass(frozen=True)
class FaultSchedule:
    """Faults in the order of their times.

    Attributes:
        seed: seed that it was drawn from.
        members: number of members that it was drawn for.
        duration_s: seconds that the run takes, from the moment at which all members train.
        faults: faults, in the order of their times.
    """

    seed: int
    members: int
    duration_s: float
    faults: tuple[Fault, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that occur, in the order of ``KINDS``."""
        found = {fault.kind for fault in self.faults}
        return tuple(kind for kind in KINDS if kind in found)

    def to_json(self) -> dict[str, Any]:
        """As a file keeps it."""
        return {**vars(self), "faults": [vars(fault) for fault in self.faults]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> FaultSchedule:
        """From what a file keeps.

        Raises:
            ValueError: it is no schedule.
        """
        try:
            faults = [Fault(**{**one, "members": tuple(one["members"])}) for one in found["faults"]]
            made = cls(int(found["seed"]), int(found["members"]), float(found["duration_s"]), tuple(faults))
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no schedule of bagua chaos: {error!r}") from None
        unknown = sorted({fault.kind for fault in faults} - set(KINDS))
        if unknown:
            raise ValueError(f"unknown kinds of faults: {', '.join(unknown)}; expected {', '.join(KINDS)}")
        strangers = {member for fault in faults for member in fault.members} - set(range(made.members))
        if strangers:
            raise ValueError(f"faults of members {sorted(strangers)}; there are {made.members}, from 0")
        return made


def draw_schedule(
    seed: int,
    members: int,
    duration_s: float,
    faults_per_s: float,
    mix: Mapping[str, float],
    lasting_s: tuple[float, float] = (5.0, 15.0),
) -> FaultSchedule:
    """The schedule of a seed.

    The number of faults, and of each kind, is that of the rate and the mix; when they happen, to whom, and in which
    order is drawn.

    Args:
        seed: another one gives another schedule.
        members: number of members.
        duration_s: seconds of the run.
        faults_per_s: faults in a second, over all members.
        mix: weight of each kind.
        lasting_s: shortest and longest fault; a kill does not last.

    Example:
        >>> schedule = draw_schedule(1, 4, 60.0, 1 / 20, {"kill": 2, "stop": 1})
        >>> [fault.kind for fault in schedule.faults]
        ['kill', 'stop', 'kill']
    """
    draw = random.Random(seed)  # noqa: S311 - nobody guards anything with it
    end_s = duration_s - min(_LAST_PART * duration_s, _LAST_S)
    kinds = _shuffled(draw, _dealt(round(faults_per_s * duration_s), mix))
    times = sorted(draw.random() * end_s for _ in kinds)
    faults = []
    for at_s, kind in zip(times, kinds, strict=True):
        order = tuple(_shuffled(draw, range(members)))
        seconds = lasting_s[0] + draw.random() * (lasting_s[1] - lasting_s[0])
        lasting = 0.0 if kind == "kill" else round(seconds, 3)
        faults.append(Fault(round(at_s, 3), kind, order, lasting, round(draw.random(), 6)))
    return FaultSchedule(seed, members, duration_s, tuple(faults))


def _dealt(count: int, mix: Mapping[str, float]) -> list[str]:
    """``count`` kinds, as close to the weights as whole numbers can be."""
    total = sum(mix.values())
    shares = {kind: count * weight / total for kind, weight in mix.items()}
    dealt = {kind: int(share) for kind, share in shares.items()}
    rest = sorted(mix, key=lambda kind: dealt[kind] - shares[kind])[: count - sum(dealt.values())]
    return [kind for kind in mix for _ in range(dealt[kind] + (kind in rest))]


def _shuffled(draw: random.Random, values: Sequence[Any]) -> list[Any]:
    """In an order that depends on nothing but what Python promises of ``random()``."""
    return [value for _, _, value in sorted((draw.random(), place, value) for place, value in enumerate(values))]


def parse_mix(text: str) -> dict[str, float]:
    """Kinds and their weights.

    Raises:
        ValueError: it is none.

    Example:
        >>> parse_mix("kill:28,stop:8")
        {'kill': 28.0, 'stop': 8.0}
    """
    mix: dict[str, float] = {}
    for word in text.split(","):
        kind, _, weight = word.strip().partition(":")
        if kind == "clock":
            raise ValueError(_NO_CLOCK)
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of fault; expected {', '.join(KINDS)}")
        if kind in mix:
            raise ValueError(f"{kind} stands there twice")
        mix[kind] = _number(weight or "1", word)
    if sum(mix.values()) <= 0:
        raise ValueError(f"{text!r} has no weight above 0")
    return mix


def parse_rate(text: str) -> float:
    """Faults in a second.

    Raises:
        ValueError: it is no rate.

    Example:
        >>> parse_rate("90/h"), parse_rate("3/min")
        (0.025, 0.05)
    """
    count, _, unit = text.partition("/")
    if unit not in _SECONDS:
        raise ValueError(f"{text!r}; expected a number of faults in an hour, as 90/h, or /min or /s")
    return _number(count, text) / _SECONDS[unit]


def parse_lasting(text: str) -> tuple[float, float]:
    """Shortest and longest time, in seconds.

    Raises:
        ValueError: these are no times.

    Example:
        >>> parse_lasting("5-15"), parse_lasting("8")
        ((5.0, 15.0), (8.0, 8.0))
    """
    shortest, _, longest = text.partition("-")
    found = (_number(shortest, text), _number(longest or shortest, text))
    if not 0 < found[0] <= found[1]:
        raise ValueError(f"{text!r}; expected seconds above 0, the shorter time first, as 5-15")
    return found


def _number(text: str, whole: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text.strip()):
        raise ValueError(f"{whole!r}; expected a number, got {text!r}")
    return float(text)
