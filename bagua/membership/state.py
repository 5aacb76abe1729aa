"""The state of a member: what it knows of itself and of the others, as they say in their records."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from bagua.comm import Cells, PhaseDeadline, ProcessGroup, Source, family, forked_error
from bagua.errors import StoreLostError
from bagua.membership.epochs import Epoch, Standing, StopReport
from bagua.membership.island import this_process
from bagua.membership.pace import Pace

_log = logging.getLogger("bagua")
#: Looks in the place of one while somebody comes in: all stop for it, and who sees it late keeps the others waiting.
_HURRY = 5
#: Runs an exchange on the group of the epoch, from the same contribution each time.
Attempt = Callable[[ProcessGroup], None]


@dataclass(frozen=True)
class Deadlines:
    """How long a process waits for what, in seconds.

    Attributes:
        beat_s: between two signs of life.
        silence_s: without a sign of life before it counts as gone; longer where signs of life come late.
        suspect_s: the same for one whose connections refused somebody.
        timeout_s: limit of the user, beyond which no silence lasts longer because signs of life come late.
        meet_s: for the members of an epoch to come, and to connect; to connect as long as usual, once that is known,
            but never less than ``silence_s``.
        poll_s: between two looks at what is about to be decided.
    """

    beat_s: float = 0.25
    silence_s: float = 3.0
    suspect_s: float = 0.6
    meet_s: float = 10.0
    poll_s: float = 0.02
    timeout_s: float = 1800.0


class Offer(NamedTuple):
    """What a member says when it was asked for the state.

    Attributes:
        exchange: number of the last exchange that is part of the state.
        epoch: number of the epoch in which it was offered.
        problem: reason why the state cannot be sent; empty if it can.
        source: place to fetch it; None with a problem.
    """

    exchange: int
    epoch: int
    problem: str = ""
    source: Source | None = None

    @classmethod
    def from_json(cls, found: Sequence[Any] | None) -> Offer | None:
        """From what the store keeps."""
        if found is None:
            return None
        exchange, epoch, problem, source = found
        return cls(exchange, epoch, problem, None if source is None else Source(*source))


@dataclass(frozen=True)
class SeatRecord:
    """What a process says of itself.

    Attributes:
        beat: grows as long as it lives.
        epoch: number of the epoch that it takes part in, or has read last.
        report: report that it has made; None while it takes part.
        waiting: it wants to join, and has no say yet.
        admit: others are to let it in without the state, which it cannot get before.
        asks: seats of members that it asks for the state.
        needs: number of the exchange whose state it asks for, or a later one; -1 if it asks for none.
        has: number of the exchange whose state it has received; -1 if none.
        exchange: number of the last exchange that counts for it as a member.
        offer: state that it offers to those who ask.
        left: why it went; empty as long as it is here.
        host: its host and process, for people.
    """

    beat: int = 0
    epoch: int = 0
    report: StopReport | None = None
    waiting: bool = False
    admit: bool = False
    asks: tuple[int, ...] = ()
    needs: int = -1
    has: int = -1
    exchange: int = 0
    offer: Offer | None = None
    left: str = ""
    host: str = ""

    def to_json(self) -> dict[str, Any]:
        """As the store keeps it."""
        return {**vars(self), "report": None if self.report is None else self.report._asdict()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any] | None) -> SeatRecord:
        """From what the store keeps; None for nothing yet."""
        if found is None:
            return cls()
        said = found["report"]
        report = None if said is None else StopReport(**{**said, "lost": tuple(said["lost"])})
        return cls(
            **{**found, "report": report, "asks": tuple(found["asks"]), "offer": Offer.from_json(found["offer"])}
        )


def seat_name(seat: int) -> str:
    """The cell by which a process takes a seat, which it keeps."""
    return f"seat/{seat}"


def take_seat(cells: Cells) -> int:
    """A number that no other island ever has."""
    name = uuid.uuid4().hex
    return next(seat for seat in itertools.count() if cells.claim(seat_name(seat), name) == name)


def epoch_name(number: int) -> str:
    """The cell that says who takes part in epoch ``number``."""
    return f"epoch/{number}"


def record_name(seat: int, rank: int = 0) -> str:
    """Where a rank of the island on a seat says how it is; the first one speaks for the island."""
    return f"record/{seat}/{rank}" if rank else f"record/{seat}"


class Roster:
    """All islands that ever took a seat, as one process sees them; or the ranks of one island.

    Args:
        cells: cells of the store.
        own: seat of this process; None for one that only looks.
        deadlines: how long silence may last.
        ranks_of: seat and size of an island: its ranks are looked at, in the place of seats.

    Attributes:
        records: latest record of each process, by seat.
    """

    def __init__(
        self, cells: Cells, own: int | None, deadlines: Deadlines, ranks_of: tuple[int, int] | None = None
    ) -> None:
        self.records: dict[int, SeatRecord] = {}
        self._cells = cells
        self._own = own
        self._deadlines = deadlines
        self._ranks_of = ranks_of
        self._taken = 0 if ranks_of is None else ranks_of[1]
        self._silent_s: dict[int, float] = {}
        self._looked: float | None = None
        #: From one sign of life to the next, of all others: a slow store or a full link makes them late.
        self._pause = PhaseDeadline(deadlines.timeout_s)

    def look(self, now: float) -> None:
        """Read all records, at ``now`` seconds on this process's clock. Raises if the store does not answer."""
        while self._ranks_of is None and self._cells.read([seat_name(self._taken)])[0] is not None:
            self._taken += 1
        seats = [seat for seat in range(self._taken) if not self.records.get(seat, SeatRecord()).left]
        found = self._cells.read([self._name(seat) for seat in seats])
        records = dict(zip(seats, map(SeatRecord.from_json, found), strict=True))
        self._listen(records, now)
        self.records = {**self.records, **records}  # Another thread may be reading the old ones.

    def _listen(self, records: Mapping[int, SeatRecord], now: float) -> None:
        """Note whose record is as it was: how long they have been silent, judged by this process's clock alone.

        Only time in which this process was awake counts: who has slept must give all others a chance to show up first.
        """
        beat_s, silent_s = self._deadlines.beat_s, dict(self._silent_s)
        since_s = 0.0 if self._looked is None else now - self._looked
        # A process that has not looked for so long was asleep, or its store is slow. It may be the first that wakes.
        awake_s = since_s if since_s <= 2 * beat_s else beat_s
        self._looked = now
        for seat, record in records.items():
            before = self.records.get(seat)
            silent_s[seat] = 0.0 if before is None else silent_s[seat] + awake_s
            if before is not None and before.beat != record.beat:
                if seat != self._own:
                    self._pause.note(silent_s[seat])
                silent_s[seat] = 0.0
        self._silent_s = silent_s  # Another thread may be reading the old ones.

    def _name(self, number: int) -> str:
        return record_name(number) if self._ranks_of is None else record_name(self._ranks_of[0], number)

    def reports(self, epoch: int) -> dict[int, StopReport]:
        """What was reported in ``epoch``, by seat."""
        said = {seat: record.report for seat, record in self.records.items()}
        return {seat: report for seat, report in said.items() if report is not None and report.epoch == epoch}

    def gone(self, epoch: int) -> dict[int, str]:
        """Why no member need wait for a process, by seat, when epoch number ``epoch`` ends; -1 for none."""
        reports = self.reports(epoch)
        silence_s, suspect_s = self._limits()
        refused = {seat for report in reports.values() for seat in report.lost}
        found = {}
        for seat, record in self.records.items():
            silent_s = self._silent_s[seat]
            suspect = seat in refused and seat not in reports
            limit_s = suspect_s if suspect else silence_s
            if record.left:
                found[seat] = record.left
            elif silent_s > limit_s and seat != self._own:
                found[seat] = f"it was silent for {silent_s:.1f} s{', and refused connections' if suspect else ''}"
        return found

    def _limits(self) -> tuple[float, float]:
        """How long silence may last, and that of one whose connections refused somebody."""
        deadlines, pause = self._deadlines, self._pause
        if not pause.known:
            return deadlines.silence_s, deadlines.suspect_s
        silence_s = max(deadlines.silence_s, pause.seconds)
        return silence_s, min(max(deadlines.suspect_s, pause.usual_s), silence_s)

    def waiting(self) -> list[int]:
        """Seats of those who are here and want to join."""
        away = self.gone(-1)
        return [seat for seat, record in self.records.items() if record.waiting and seat not in away]

    def is_coming(self) -> bool:
        """Whether somebody receives the state, or has it, and is about to come in."""
        return any(max(self.records[seat].needs, self.records[seat].has) >= 0 for seat in self.waiting())

    def exchange_of(self, seats: Collection[int]) -> int:
        """Number of the last exchange that counts for one of ``seats``."""
        return max((self.records[seat].exchange for seat in seats if seat in self.records), default=0)

    def left(self) -> frozenset[int]:
        """Seats of those who said goodbye."""
        return frozenset(seat for seat, record in self.records.items() if record.left)

    def alive(self) -> tuple[int, ...]:
        """Seats of those who are here, members or not."""
        away = self.gone(-1)
        return tuple(sorted(seat for seat in self.records if seat not in away))


class Training(Protocol):
    """A model as it is trained here, for those who receive its state and give it."""

    def give(self) -> dict[str, Any]:
        """The state between two steps, in parts by name, made of numbers, strings, tensors and containers of these."""

    def take(self, state: Mapping[str, Any], step: int) -> None:
        """Replace the state, and go on after step number ``step``; -1 for the one that the state tells."""

    def step(self) -> int:
        """Number of the last step."""


class Samples(Protocol):
    """What deals out samples, as ``ElasticSampler`` does."""

    @property
    def fact(self) -> str:
        """What all islands have in common."""

    def begin(self) -> None:
        """This island has come in."""

    def said(self) -> int:
        """How many samples this rank has drawn since the last exchange."""

    def hear(self, said: Mapping[int, int]) -> None:
        """What all have said, by seat, if the exchange comes to count."""

    def settle(self) -> None:
        """The exchange counts."""

    def give(self) -> dict[str, Any]:
        """What a newcomer needs."""

    def take(self, state: Mapping[str, Any]) -> None:
        """Begin where the others are."""


class MemberState:
    """What one rank of an island knows of itself and of the others. All else reads and writes it here.

    A thread posts the record of this rank, and reads those of others, ``standing`` and ``link``. Only the thread that
    trains replaces these two.

    Args:
        cells: cells of the store.
        seat: seat of the island; see ``take_seat``.
        deadlines: how often to look, and how long silence may last.
        place: rank of this process in the island, and the size of the island.
        clock: seconds.

    Attributes:
        record: words of this rank on itself.
        roster: all islands, as this process has seen them last.
        ranks: ranks of its own island, likewise.
        trouble: reason why the store could not be asked lately; empty if it could.
        has_left: True when this process has said goodbye.
        training: model that is trained; None before there is one.
        samples: sampler that agrees with the others in exchanges; None if there is none.
        pace: pace of this island, and the steps that all have agreed on.
        standing: progress of the island, on its first rank; None before it has the state.
        link: epoch whose members this rank has met last, and their group; None before the first. One value, because the
            thread reads both.
        at: last exchange that counts and last step, when the first rank was between two steps last.
        attempt: exchange that is under way.
        contributed: seats whose contributions are part of the last result.
        called: True if newcomers are let in before the next step.
        waiting_for: reason why nothing goes on, on the first rank; empty if something does.
    """

    def __init__(
        self,
        cells: Cells,
        seat: int,
        deadlines: Deadlines,
        place: tuple[int, int] = (0, 1),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cells, self.seat, self.deadlines = cells, seat, deadlines
        self.rank, self.size = place
        self.record = SeatRecord(host=this_process())
        self.roster = Roster(cells, None if self.rank else seat, deadlines)
        self.ranks = Roster(cells, self.rank, deadlines, (seat, self.size))
        self.trouble = ""
        self.has_left = False
        self.training: Training | None = None
        self.samples: Samples | None = None
        self.pace = Pace(seat)
        self.standing: Standing | None = None
        self.link: tuple[Epoch, ProcessGroup] | None = None
        self.at = (0, 0)
        self.attempt: Attempt | None = None
        self.contributed: tuple[int, ...] = ()
        self.called = False
        self.waiting_for = ""
        self._clock = clock
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._forked = False
        self.tell()
        self.look()
        family.add(self)

    @property
    def epoch(self) -> Epoch | None:
        """That whose members this rank has met last; None before the first."""
        return None if self.link is None else self.link[0]

    def read_epoch(self, number: int) -> Epoch | None:
        """Epoch ``number``; None if it is not written. Raises if the store does not answer."""
        (written,) = self.cells.read([epoch_name(number)])
        return None if written is None else Epoch.from_json(written)

    def is_over(self, epoch: Epoch) -> bool:
        """Whether the next epoch is written, as far as the store answers."""
        try:
            return self.read_epoch(epoch.number + 1) is not None
        except StoreLostError as error:
            self.trouble = error.problem
            return False

    def give(self) -> dict[str, object]:
        """What a newcomer receives, or a run that begins anew: the training, the pace, and the place in the data."""
        assert self.training is not None
        samples = None if self.samples is None else self.samples.give()
        return {**self.training.give(), "pace": dict(self.pace.numbers), "samples": samples}

    def take(self, state: dict[str, Any], step: int) -> None:
        """Replace the state of this rank by what another one gave, and go on after ``step``."""
        assert self.training is not None
        samples = state.pop("samples")
        self.pace.numbers = state["pace"]
        self.training.take(state, step)
        if self.samples is not None:
            self.samples.take(samples)

    def lost_ranks(self) -> dict[int, str]:
        """Why this island is at its end, by rank of those who are silent. Who said goodbye is not missed."""
        left = self.ranks.left()
        return {rank: why for rank, why in self.ranks.gone(-1).items() if rank not in left}

    # Signs of life.

    def tell(self, **news: Any) -> None:
        """Say how this process is, by fields of the record. What the store does not take is said with the next beat."""
        if self._forked:
            raise forked_error()
        with self._lock, self._noting():
            self.record = dataclasses.replace(self.record, beat=self.record.beat + 1, **news)
            self.cells.post(record_name(self.seat, self.rank), self.record.to_json())

    def note(self, **news: Any) -> None:
        """Say it, by fields of the record, with the next sign of life."""
        with self._lock:
            self.record = dataclasses.replace(self.record, **news)

    def look(self) -> None:
        """See how the others are, if the store answers."""
        with self._lock, self._noting():
            now = self._clock()
            self.roster.look(now)
            if self.size > 1:
                self.ranks.look(now)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
            self.trouble = ""
        except StoreLostError as error:
            self.trouble = error.problem

    def start(self, watch: Callable[[], None]) -> None:
        """Give signs of life from now on, and have ``watch`` called after each look at the others."""

        def live() -> None:
            while not self._ended.wait(self.deadlines.beat_s / (_HURRY if self.roster.is_coming() else 1)):
                try:
                    self.tell()
                    self.look()
                    watch()
                except Exception as error:  # noqa: BLE001 - who gives no sign of life is expelled: go on
                    self.trouble = f"signs of life fail: {error!r}"
                    _log.exception("islands: seat %d cannot say that it is alive", self.seat)

        thread = threading.Thread(target=live, name="bagua-islands", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.leave("its process can start no thread")  # Others would take it for alive until it is silent for long.
            raise
        self._thread = thread

    def leave(self, reason: str) -> None:
        """Say goodbye, and give no more signs of life. Idempotent."""
        if self._forked or self._ended.is_set():
            return
        self.has_left = True
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.deadlines.silence_s)
        self.tell(left=reason, waiting=False)

    def disown(self) -> None:
        """In a forked child: the seat is the parent's."""
        self._forked = True
        self._lock = threading.RLock()
