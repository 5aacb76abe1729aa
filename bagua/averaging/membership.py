"""Who takes part in a session: what members say of themselves, who is lost, and who will not come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from bagua.comm import Board, Silence
from bagua.errors import NonFiniteError, PeerLostError

_CALL = "averaging of models"


class MemberState(Enum):
    """What a member is doing."""

    TRAINING = "training"
    PAUSING = "pausing"  #: It has called ``abort`` and waits, but still takes part in rounds.
    STOPPED = "stopped"  #: It ended because all had agreed to.
    LEFT = "left"  #: It ended by itself.
    DIVERGED = "diverged"  #: It ended because its weights are not finite.

    @property
    def gone(self) -> bool:
        """Whether no other member need wait for one in this state."""
        return self in (MemberState.STOPPED, MemberState.LEFT, MemberState.DIVERGED)


@dataclass(frozen=True)
class Record:
    """One member's word.

    Attributes:
        state: activity of the member.
        beat: grows as long as the member lives.
        warming: True while it still trains synchronously.
        begun: synchronous steps that it has begun.
        fresh: True if it has not trained since weights were made equal, or loaded.
        round: the round that it is in, or waits for.
        ready: True if its weights for that round are there.
        connection: the connection that it has to the members of that round; empty for none.
        connecting: True if it may be silent while it waits for a connection.
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
    connection: str = ""
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


class FailureDetector:
    """Judges by the beats of the records who is still alive.

    Args:
        rank: rank of this member.
        patience: seconds of silence after which a member is lost.

    Attributes:
        lost: members that are taken for dead.
    """

    def __init__(self, rank: int, patience: Patience) -> None:
        self.lost: set[int] = set()
        self._rank = rank
        self._patience = patience
        self._silence = Silence(patience.beat_s)
        self._suspects: set[int] = set()

    def look(self, records: Sequence[Record | None], now: float) -> None:
        """Take new records into account.

        Args:
            records: records of all members; None for a member that has not come yet.
            now: seconds on this member's clock.
        """
        awaited = {
            rank: record
            for rank, record in enumerate(records)
            if rank != self._rank and not (record is not None and record.state.gone)
        }
        heard = self._silence.look({rank: record.beat if record else -1 for rank, record in awaited.items()}, now)
        self._suspects -= heard.keys()
        for rank, record in awaited.items():
            if self._silence.seconds[rank] > self._limit_s(rank, record):
                self.lost.add(rank)

    def _limit_s(self, rank: int, record: Record | None) -> float:
        patience = self._patience
        if record is None:
            return patience.join_s
        suspected = rank in self._suspects and not record.connecting
        return min(patience.suspect_s, patience.silence_s) if suspected else patience.silence_s

    def suspect(self, ranks: Collection[int]) -> None:
        """Something else says that ``ranks`` are dead: their silence is believed sooner."""
        self._suspects |= set(ranks) - {self._rank}

    def believe(self, ranks: Collection[int]) -> None:
        """Another member takes ``ranks`` for dead, so they are for everyone."""
        self.lost |= set(ranks) - {self._rank}


class Departures:
    """The members that are gone for good: they died, or their processes ended. It outlives the sessions.

    Args:
        board: for all sessions of a model.

    Example:
        >>> from bagua.comm.store.serving import thread_store
        >>> store = thread_store()
        >>> Departures(Board(store, 0, (0, 1, 2))).note({2: "its process ends"})
        >>> Departures(Board(store, 1, (0, 1, 2))).record_of(2).reason
        'its process ends'
        >>> Departures(Board(store, 1, (0, 1, 2))).record_of(0)
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._noted: set[int] = set()

    def note(self, gone: Mapping[int, str], session: str = "") -> None:
        """Say that ranks are gone.

        Args:
            gone: why, for each of the ranks.
            session: name of the session that lost them, and whose members hear of it otherwise.

        Raises:
            PeerLostError: the store is gone.
        """
        for rank in gone.keys() - self._noted:
            self._noted.add(rank)
            self._board.decide(f"gone/{rank}", [gone[rank], session])

    def record_of(self, rank: int, session: str = "now") -> Record | None:
        """What ``rank`` would say in a session to which it will not come; None if it still may come.

        Args:
            rank: has not come yet.
            session: name of the session; a rank that is lost in this very session has not left it.

        Raises:
            PeerLostError: the store is gone.
        """
        reason, lost_in = self._board.decided(f"gone/{rank}") or ["", session]
        return None if lost_in == session else Record(MemberState.LEFT, reason=reason)


class MembershipView:
    """All members, as one of them sees them on the board.

    Args:
        board: records and decisions of this session.
        departures: members that will never come.
        patience: seconds to wait for signs of life.
    """

    def __init__(self, board: Board, departures: Departures, patience: Patience) -> None:
        self.rank = board.rank
        self.names = board.ranks
        self.looked = float("-inf")
        self._board = board
        self._departures = departures
        self._absent: dict[int, Record] = {}
        self._patience = patience
        self._detector = FailureDetector(self.rank, patience)
        self._records: list[Record | None] = [None] * len(self.names)
        self._posted = float("-inf")
        self._last = Record()
        self._told: set[int] = set()

    # Looking and telling.

    def look(self, now: float) -> None:
        """Read all records.

        Raises:
            PeerLostError: the store is gone.
        """
        self.looked = now
        self._records = [
            self._record_of(rank) if found is None else Record.from_json(found)
            for rank, found in enumerate(self._board.read())
        ]
        self._detector.look(self._records, now)
        ended = {rank for rank, record in self._known() if record.state.gone}
        for rank, record in self._known():
            if rank != self.rank and record.state is not MemberState.STOPPED:
                self._detector.believe(set(record.lost) - ended)

        self._departures.note(dict.fromkeys(self._detector.lost, "it died"), self._board.name)

    def _record_of(self, rank: int) -> Record | None:
        """The record of one who has not come: that of one who has left, if it is among the departures."""
        if rank != self.rank and rank not in self._absent:
            answer = self._departures.record_of(rank, self._board.name)
            if answer is not None:
                self._absent[rank] = answer
        return self._absent.get(rank)

    def leave_for_good(self, reason: str) -> None:
        """No later session need wait for this member."""
        self._departures.note({self.rank: reason})

    def _known(self) -> list[tuple[int, Record]]:
        return [(rank, record) for rank, record in enumerate(self._records) if record is not None]

    def tell(self, record: Record, now: float, *, at_once: bool = False) -> None:
        """Post this member's record if there is news, or if it is time for a sign of life.

        Args:
            record: without ``beat`` and ``lost``, which are known here.
            now: seconds on this member's clock.
            at_once: post in any case.
        """
        lost = tuple(sorted(self._detector.lost))
        same = dataclasses.replace(record, beat=self._last.beat, lost=lost)
        if at_once or same != self._last or now - self._posted >= self._patience.beat_s:
            self._last = dataclasses.replace(same, beat=self._last.beat + 1)
            self._posted = now
            self._board.post(self._last.to_json())

    # Questions about others.

    def record(self, rank: int) -> Record:
        """What ``rank`` says of itself; a fresh record as long as it has not come."""
        return self._records[rank] or Record()

    def gone(self, rank: int) -> bool:
        """Whether no other member need wait for ``rank``."""
        return rank in self._detector.lost or self.record(rank).state.gone

    def is_ready(self, rank: int, number: int) -> bool:
        """Whether the weights of ``rank`` for round ``number`` are there."""
        return self.record(rank).ready and self.record(rank).round == number

    def gave_up(self, rank: int, number: int) -> bool:
        """Whether ``rank`` will not come to the exchange of round ``number``, or not any more."""
        return self.gone(rank) or self.record(rank).broke == number

    def _others(self, test: Callable[[int], bool]) -> list[int]:
        """Ranks other than this one that pass ``test``."""
        return [rank for rank in range(len(self.names)) if rank != self.rank and test(rank)]

    def present(self) -> list[int]:
        """Other ranks that are not gone."""
        return self._others(lambda rank: not self.gone(rank))

    def all_others_rest(self) -> bool:
        """Whether every other rank is gone or has called ``abort``."""
        return all(self.record(rank).state is MemberState.PAUSING for rank in self.present())

    def some_have_stopped(self) -> bool:
        """Whether another rank has ended because all had agreed to."""
        return bool(self._others(lambda rank: self.record(rank).state is MemberState.STOPPED))

    def have_trained(self) -> bool:
        """Whether weights of others may differ, so that a last average is needed."""
        return any(not (self.record(rank).fresh or self.record(rank).warming) for rank in self.present())

    def begun_beyond(self, steps: int) -> list[int]:
        """Ranks that have begun a synchronous step after ``steps`` of them."""
        return [rank for rank in self.present() if self.record(rank).warming and self.record(rank).begun > steps]

    def suspect(self, ranks: Collection[int]) -> None:
        """A transfer with these global ranks failed: the silence of those that are members is believed sooner."""
        self._detector.suspect([self.names.index(rank) for rank in ranks if rank in self.names])

    # What is wrong, as errors.

    def loss(self) -> BaseException | None:
        """The error for ranks that died or diverged since the last question, or None."""
        failed = self._others(
            lambda rank: rank in self._detector.lost or self.record(rank).state is MemberState.DIVERGED
        )
        news = [rank for rank in failed if rank not in self._told]
        self._told.update(news)
        if not news:
            return None
        diverged = [rank for rank in news if rank not in self._detector.lost]
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
            self._others(lambda _: True),
            "It gave no sign of life for too long; raise peer_timeout_s if that can happen.",
        )

    def early_departure(self) -> BaseException | None:
        """The error if somebody left who is needed in each step, or None."""
        left = self._others(lambda rank: self.gone(rank) and not self._has_warmed_up(rank))
        if not left:
            return None
        reason = self.record(left[0]).reason
        return self._lost(
            f"rank {self.names[left[0]]} left during warm-up, in which all ranks step together"
            f"{f': {reason}' if reason else ''}",
            left,
        )

    def broken_end(self) -> PeerLostError:
        """The error if the last average broke off, with which all would have ended."""
        return self._lost(
            "the last average broke off, so the models of ranks may differ",
            self._others(
                lambda rank: rank not in self._detector.lost and self.record(rank).state is not MemberState.LEFT
            ),
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
