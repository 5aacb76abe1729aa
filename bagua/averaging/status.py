"""How averaging goes, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["AveragingStatus", "Progress"]


@dataclass
class Progress:
    """What a member has done so far.

    Attributes:
        rounds: averages that were delivered.
        failed: exchanges that broke off.
        overflowed: averages that were not finite although all weights were.
        nbytes: bytes of all snapshots that were exchanged.
        round_s: seconds from the agreement to the average, in the last round.
        distance: norm of the difference between average and own weights, in the last round.
        members: ranks that took part in the last round.
    """

    rounds: int = 0
    failed: int = 0
    overflowed: int = 0
    nbytes: int = 0
    round_s: float = 0.0
    distance: float = 0.0
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class AveragingStatus:
    """What a user watches to know that averaging works.

    Attributes:
        state: ``idle`` (before the first step, or on one rank), ``warming up``, ``averaging``,
            ``paused`` (after ``abort``), or ``alone`` (nobody is left to average with).
        rounds: averages that this rank has received since averaging began or was resumed.
        age_steps: steps since this rank last took in an average; None if it never did.
        age_ms: the same in milliseconds.
        sent_bytes: of weights that went into exchanges.
        round_ms: from the agreement to the average, in the last round.
        distance: Euclidean norm of the difference between the average and this rank's weights,
            in the last round.
        members: ranks that took part in the last round.
        failed: exchanges that broke off, and were left out.
        overflowed: averages that were dropped because they were not finite.
    """

    state: Literal["idle", "warming up", "averaging", "paused", "alone"] = "idle"
    rounds: int = 0
    age_steps: int | None = None
    age_ms: float | None = None
    sent_bytes: int = 0
    round_ms: float = 0.0
    distance: float = 0.0
    members: tuple[int, ...] = ()
    failed: int = 0
    overflowed: int = 0
