"""Who is in a session, how each of them is, and what this member tells them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from bagua.averaging.records import MemberState, Record, Watch
from bagua.averaging.roll import Roll
from bagua.comm import Board
from bagua.errors import NonFiniteError, PeerLostError

__all__ = ["Company", "Patience"]

_CALL = "averaging of models"


@dataclass(frozen=True)
class Patience:
    """How long a member waits for what, in seconds.

    Attributes:
        beat_s: between two signs of life.
        silence_s: without a sign of life before a member is lost.
        suspect_s: the same for a member with which a transfer has just failed.
        join_s: until a member comes to a session for the first time.
    """

    beat_s: float = 1.0
    silence_s: float = 15.0
    suspect_s: float = 3.0
    join_s: float = 1800.0


class Company:
    """All members, as one of them sees them on the board.

    Args:
        board: of this session alone.
        roll: who will never come.
        patience: how long to wait for signs of life.
    """

    def __init__(self, board: Board, roll: Roll, patience: Patience) -> None:
        self.rank = board.rank
        self.names = board.ranks
        self.looked = float("-inf")
        self._board = board
        self._roll = roll
        self._absent: dict[int, Record] = {}
        self._patience = patience
        self._watch = Watch(
            self.rank, len(self.names), beat_s=patience.beat_s, silence_s=patience.silence_s,
            suspect_s=patience.suspect_s, join_s=patience.join_s,
        )  # fmt: skip
        self._records: list[Record | None] = [None] * len(self.names)
        self._posted = float("-inf")
        self._last = Record()
        self._mourned: set[int] = set()

    # Looking and telling.

    def look(self, now: float) -> None:
        """Read all records.

        Raises:
            PeerLostError: the store is gone.
        """
        self.looked = now
        self._records = [
            self._answer_for(rank) if found is None else Record.from_json(found)
            for rank, found in enumerate(self._board.read())
        ]
        self._watch.look(self._records, now)
        ended = {rank for rank, record in self._known() if record.state.gone}
        for rank, record in self._known():
            if rank != self.rank and record.state is not MemberState.STOPPED:
                self._watch.believe(set(record.lost) - ended)

        self._roll.strike(dict.fromkeys(self._watch.lost, "it died"), self._board.name)

    def _answer_for(self, rank: int) -> Record | None:
        """The record of one who has not come: that of one who has left, if the roll says that it never will."""
        if rank != self.rank and rank not in self._absent:
            answer = self._roll.answer_for(rank, self._board.name)
            if answer is not None:
                self._absent[rank] = answer
        return self._absent.get(rank)

    def leave_for_good(self, reason: str) -> None:
        """No later session need wait for this member."""
        self._roll.strike({self.rank: reason})

    def _known(self) -> list[tuple[int, Record]]:
        return [(rank, record) for rank, record in enumerate(self._records) if record is not None]

    def tell(self, record: Record, now: float, *, at_once: bool = False) -> None:
        """Post this member's record if there is news, or if it is time for a sign of life.

        Args:
            record: without ``beat`` and ``lost``, which are known here.
            now: seconds on this member's clock.
            at_once: in any case.
        """
        lost = tuple(sorted(self._watch.lost))
        same = Record(**{**vars(record), "beat": self._last.beat, "lost": lost})
        if at_once or same != self._last or now - self._posted >= self._patience.beat_s:
            self._last = Record(**{**vars(same), "beat": self._last.beat + 1})
            self._posted = now
            self._board.post(self._last.to_json())

    def members_of(self, ranks: Sequence[int]) -> list[int]:
        """The members with these global ranks; others are left out."""
        return [self.names.index(rank) for rank in ranks if rank in self.names]

    # Questions about others.

    def record(self, rank: int) -> Record:
        """What ``rank`` says of itself; a fresh record as long as it has not come."""
        return self._records[rank] or Record()

    def gone(self, rank: int) -> bool:
        """Whether nobody need wait for ``rank``."""
        return rank in self._watch.lost or self.record(rank).state.gone

    def others(self, test: Callable[[int], bool]) -> list[int]:
        """Ranks other than this one that pass ``test``."""
        return [rank for rank in range(len(self.names)) if rank != self.rank and test(rank)]

    def present(self) -> list[int]:
        """Other ranks that are not gone."""
        return self.others(lambda rank: not self.gone(rank))

    def all_others_rest(self) -> bool:
        """Whether every other rank is gone or has called ``abort``."""
        return all(self.record(rank).state is MemberState.PAUSING for rank in self.present())

    def some_have_stopped(self) -> bool:
        """Whether another rank has ended because all had agreed to."""
        return bool(self.others(lambda rank: self.record(rank).state is MemberState.STOPPED))

    def have_trained(self) -> bool:
        """Whether weights of others may differ, so that a last average is needed."""
        return any(not (self.record(rank).fresh or self.record(rank).warming) for rank in self.present())

    def begun_beyond(self, steps: int) -> list[int]:
        """Ranks that have begun a synchronous step after ``steps`` of them."""
        return [rank for rank in self.present() if self.record(rank).warming and self.record(rank).begun > steps]

    def suspect(self, ranks: Collection[int]) -> None:
        """A transfer with ``ranks`` failed: their silence is believed sooner."""
        self._watch.suspect(ranks)

    # What is wrong, as errors.

    def bereavement(self) -> BaseException | None:
        """The error for ranks that died or diverged since the last question, or None."""
        failed = self.others(lambda rank: rank in self._watch.lost or self.record(rank).state is MemberState.DIVERGED)
        news = [rank for rank in failed if rank not in self._mourned]
        self._mourned.update(news)
        if not news:
            return None
        diverged = [rank for rank in news if rank not in self._watch.lost]
        if diverged:
            return self.divergence(diverged[0])
        names = [self.names[rank] for rank in news]
        return self._lost(
            f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))} gave no sign of life",
            news,
            "It died, was stopped, or was in one call that held the interpreter's lock for that long: raise "
            "peer_timeout_s then. The model of this rank is intact: save it, or go on with the ranks that are left.",
        )

    def exclusion(self, *, certain: bool = False) -> BaseException | None:
        """The error if others took this rank for dead, or None.

        Args:
            certain: it is known from elsewhere.
        """
        if not certain and not any(self.rank in record.lost for _, record in self._known()):
            return None
        return self._lost(
            "the other ranks took this one for dead",
            self.others(lambda _: True),
            "It gave no sign of life for too long; raise peer_timeout_s if that can happen.",
        )

    def desertion(self) -> BaseException | None:
        """The error if somebody left who is needed in each step, or None."""
        left = self.others(lambda rank: self.gone(rank) and not self._has_warmed_up(rank))
        if not left:
            return None
        reason = self.record(left[0]).reason
        return self._lost(
            f"rank {self.names[left[0]]} left during warm-up, in which all ranks step together"
            f"{f': {reason}' if reason else ''}",
            left,
        )

    def parting(self) -> PeerLostError:
        """The error if the last average broke off, with which all would have ended."""
        return self._lost(
            "the last average broke off, so the models of ranks may differ",
            self.others(lambda rank: rank not in self._watch.lost and self.record(rank).state is not MemberState.LEFT),
            "The model of this rank is intact: resume() and abort() on all ranks try again, or use that of one rank.",
        )

    def _has_warmed_up(self, rank: int) -> bool:
        """Whether ``rank`` came, and has all synchronous steps behind it: in these this one had its part, too."""
        return self._records[rank] is not None and rank not in self._absent and not self.record(rank).warming

    def divergence(self, rank: int) -> NonFiniteError:
        """The error for weights of ``rank`` that cannot be averaged."""
        name = self.names[rank]
        return NonFiniteError(
            f"the weights of rank {name} are not finite, so they were not averaged",
            rank=name,
            advice="Look for a learning rate that is too high on that rank; the other ranks' weights are intact.",
        )

    def _lost(self, problem: str, ranks: list[int], advice: str = "") -> PeerLostError:
        names = [self.names[rank] for rank in ranks]
        return PeerLostError(problem, rank=self.names[self.rank], call=_CALL, peers=names, advice=advice)
