"""Who is late, told without comparing clocks: who comes last waits least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from bagua.comm import Recorder

#: Below this share of the time, waiting is no matter.
_LEAST_SHARE = 0.005
#: One rank is to blame if it is blamed for so large a part of the waiting more than any other one, twice as much where
#: there are two: of two ranks that are late now and then, one always has the larger part.
_CLEAR_SHARE = 1 / 3
#: Or if it came last more often than any other one, by so many standard deviations of chance.
_CLEAR_DEVIATIONS = 3.0
#: Where no rank sees who comes when: so much of the differences between ranks lies between it and the next one.
_CLEAR_GAP = 0.5


class Reading(NamedTuple):
    """What a rank had waited up to one moment.

    Attributes:
        at: the moment, in seconds.
        waits: seconds waited for each rank that came last.
        collectives_s: seconds in collectives, whatever part of it was waiting.
        lasts: how often each rank came last, and late: a call in which all come nearly together blames no rank.
    """

    at: float
    waits: Mapping[int, float]
    collectives_s: float
    lasts: Mapping[int, float] = MappingProxyType({})

    @classmethod
    def of(cls, recorder: Recorder) -> Reading:
        """That of this rank, now."""
        return cls(recorder.clock(), recorder.waits(), recorder.times().of_collectives_s, recorder.lasts())

    @classmethod
    def told(cls, beat: Mapping[str, Any]) -> Reading:
        """That which a rank has told lately in its beat, where numbers of ranks are strings."""
        waits, lasts = ({int(rank): one for rank, one in beat.get(key, {}).items()} for key in ("waits", "lasts"))
        return cls(beat["window_s"], waits, beat["collectives_s"], lasts)

    def since(self, before: Reading) -> Reading:
        """What has come since another reading; ``at`` is the time between."""
        waits = {rank: seconds - before.waits.get(rank, 0.0) for rank, seconds in self.waits.items()}
        lasts = {rank: times - before.lasts.get(rank, 0.0) for rank, times in self.lasts.items()}
        return Reading(self.at - before.at, waits, self.collectives_s - before.collectives_s, lasts)


def latest_rank(readings: Mapping[int, Reading]) -> int:
    """The rank for which the others wait most; -1 if none stands out.

    Args:
        readings: latest waits of ranks, those of this rank first.

    Example:
        >>> latest_rank({0: Reading(10.0, {1: 2.0, 2: 0.1}, 3.0)})
        1
        >>> latest_rank({0: Reading(10.0, {}, 3.0), 1: Reading(10.0, {}, 0.5)})
        1
    """
    blamed = _summed(one.waits for one in readings.values())
    if not blamed:
        return _who_waited_least(readings)
    lasts = _summed(one.lasts for one in readings.values())
    most, next_most = _leaders(lasts)
    rank = most[0]
    # Who is always a little late is hidden in seconds by those that lose their core for long, now and then.
    if most[1] - next_most <= _CLEAR_DEVIATIONS * math.sqrt(most[1] + next_most):
        (rank, seconds), next_seconds = _leaders(blamed)
        if seconds - next_seconds <= _CLEAR_SHARE * sum(blamed.values()):
            return -1
    window_s = next(iter(readings.values())).at
    return rank if blamed.get(rank, 0.0) > _LEAST_SHARE * window_s * max(len(readings) - 1, 1) else -1


def _summed(of_ranks: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """What all say of each rank."""
    total: dict[int, float] = {}
    for said in of_ranks:
        for rank, amount in said.items():
            total[rank] = total.get(rank, 0.0) + amount
    return total


def _leaders(amounts: Mapping[int, float]) -> tuple[tuple[int, float], float]:
    """The rank with the most, how much that is, and how much the next one has."""
    ordered = sorted(amounts.items(), key=lambda item: item[1], reverse=True)
    return (ordered or [(-1, 0.0)])[0], ordered[1][1] if len(ordered) > 1 else 0.0


def latest_of(beats: Mapping[int, Mapping[str, Any]]) -> int:
    """The rank for which all wait most, by what they have said; -1 if none stands out.

    Args:
        beats: beat of each rank: ``window_s``, ``waits``, ``collectives_s``, ``lasts``.
    """
    return latest_rank({rank: Reading.told(beats[rank]) for rank in sorted(beats)})


def _who_waited_least(readings: Mapping[int, Reading]) -> int:
    """Where no rank sees who comes when: all leave a collective together, so who was in it the shortest came last."""
    inside = {rank: one.collectives_s / one.at for rank, one in readings.items() if one.at > 0}
    if len(inside) < 2:
        return -1
    shares = sorted(inside.values())
    spread = shares[-1] - shares[0]
    if spread <= 2 * _LEAST_SHARE or shares[1] - shares[0] <= _CLEAR_GAP * spread:
        return -1
    return min(inside, key=lambda rank: inside[rank])
