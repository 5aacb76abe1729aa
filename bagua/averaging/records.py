"""What each member of a session says of itself on the board."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["MemberState", "Record", "Watch"]


class MemberState(Enum):
    """What a member is doing."""

    TRAINING = "training"
    PAUSING = "pausing"  #: It has called ``abort`` and waits, but still takes part in rounds.
    STOPPED = "stopped"  #: It ended because all had agreed to.
    LEFT = "left"  #: It ended by itself.
    DIVERGED = "diverged"  #: It ended because its weights are not finite.

    @property
    def gone(self) -> bool:
        """Whether nobody need wait for a member in this state."""
        return self in (MemberState.STOPPED, MemberState.LEFT, MemberState.DIVERGED)


@dataclass(frozen=True)
class Record:
    """One member's word.

    Attributes:
        state: what it is doing.
        beat: grows as long as the member lives.
        warming: whether it still trains synchronously.
        begun: synchronous steps that it has begun.
        fresh: whether it has not trained since weights were made equal, or loaded.
        round: the round that it is in, or waits for.
        ready: whether its weights for that round are there.
        channel: the connection that it has to the members of that round; empty for none.
        connecting: whether it may be silent while it waits for a connection.
        broke: the last round whose exchange broke off for it, or -1.
        lost: members that it takes for dead.
        reason: why it left, for people.
    """

    state: MemberState = MemberState.TRAINING
    beat: int = 0
    warming: bool = False
    begun: int = 0
    fresh: bool = True
    round: int = 0
    ready: bool = False
    channel: str = ""
    connecting: bool = False
    broke: int = -1
    lost: tuple[int, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the board keeps it."""
        return {**dataclasses.asdict(self), "state": self.state.value, "lost": list(self.lost)}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Record:
        """From what the board keeps."""
        return cls(**{**found, "state": MemberState(found["state"]), "lost": tuple(found["lost"])})


class Watch:
    """Who is still alive, judged by the beats of the records.

    Only time during which this member itself was awake counts: after a machine has slept,
    everybody else must have a chance to show up first.

    Args:
        rank: this member.
        size: number of members.
        beat_s: how often members show that they live.
        silence_s: who is silent for so long is lost.
        suspect_s: the same for a member that broke off in the middle of a transfer.
        join_s: how long a member that has not come yet is waited for.
    """

    def __init__(
        self, rank: int, size: int, *, beat_s: float, silence_s: float, suspect_s: float, join_s: float
    ) -> None:
        self._rank = rank
        self._step_s = 2 * beat_s
        self._silence_s = silence_s
        self._suspect_s = min(suspect_s, silence_s)
        self._join_s = join_s
        self._beats = [-1] * size
        self._silent_s = [0.0] * size
        self._suspects: set[int] = set()
        self._connecting: set[int] = set()
        self._looked: float | None = None
        self.lost: set[int] = set()

    def look(self, records: Sequence[Record | None], now: float) -> None:
        """Take new records into account.

        Args:
            records: of all members.
            now: seconds on this member's clock.
        """
        awake_s = 0.0 if self._looked is None else min(now - self._looked, self._step_s)
        self._looked = now
        for rank, record in enumerate(records):
            if rank == self._rank or (record is not None and record.state.gone):
                continue
            beat = -1 if record is None else record.beat
            (self._connecting.add if record is not None and record.connecting else self._connecting.discard)(rank)
            if beat != self._beats[rank]:
                self._beats[rank], self._silent_s[rank] = beat, 0.0
                self._suspects.discard(rank)
                continue
            self._silent_s[rank] += awake_s
            if self._silent_s[rank] > self._patience_s(rank):
                self.lost.add(rank)

    def _patience_s(self, rank: int) -> float:
        if self._beats[rank] < 0:
            return self._join_s
        return self._suspect_s if rank in self._suspects - self._connecting else self._silence_s

    def suspect(self, ranks: Collection[int]) -> None:
        """Something else says that ``ranks`` are dead: their silence is believed sooner."""
        self._suspects |= set(ranks) - {self._rank}

    def believe(self, ranks: Collection[int]) -> None:
        """Another member takes ``ranks`` for dead, so they are for everyone."""
        self.lost |= set(ranks) - {self._rank}
