"""Who is there: the seats that were taken, what each says of itself, and how long it has been silent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bagua.comm import Cells, PhaseDeadline, Silence
from bagua.membership.epochs import StopReport
from bagua.membership.transfer import Offer


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
    def from_json(cls, found: Mapping[str, Any]) -> SeatRecord:
        """From what the store keeps."""
        said = found["report"]
        report = None if said is None else StopReport(**{**said, "lost": tuple(said["lost"])})
        return cls(
            **{**found, "report": report, "asks": tuple(found["asks"]), "offer": Offer.from_json(found["offer"])}
        )


def seat_name(seat: int) -> str:
    """The cell by which a process takes a seat, which it keeps."""
    return f"seat/{seat}"


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
        self._silence = Silence(deadlines.beat_s)
        #: From one sign of life to the next, of all others: a slow store or a full link makes them late.
        self._pause = PhaseDeadline(deadlines.timeout_s)

    def look(self, now: float) -> None:
        """Read all records.

        Args:
            now: seconds on this process's clock.

        Raises:
            StoreLostError: the store does not answer.
        """
        while self._ranks_of is None and self._cells.read([seat_name(self._taken)])[0] is not None:
            self._taken += 1
        seats = [seat for seat in range(self._taken) if not self.records.get(seat, SeatRecord()).left]
        found = self._cells.read([self._name(seat) for seat in seats])
        read = [SeatRecord() if said is None else SeatRecord.from_json(said) for said in found]
        records = dict(zip(seats, read, strict=True))
        ended = self._silence.look({seat: record.beat for seat, record in records.items()}, now)
        for seat, silent_s in ended.items():
            if seat != self._own:
                self._pause.note(silent_s)
        self.records = {**self.records, **records}  # Another thread may be reading the old ones.

    def _name(self, number: int) -> str:
        return record_name(number) if self._ranks_of is None else record_name(self._ranks_of[0], number)

    def reports(self, epoch: int) -> dict[int, StopReport]:
        """What was reported in ``epoch``, by seat."""
        said = {seat: record.report for seat, record in self.records.items()}
        return {seat: report for seat, report in said.items() if report is not None and report.epoch == epoch}

    def gone(self, epoch: int, suspects: Collection[int] = ()) -> dict[int, str]:
        """Why no member need wait for a process, by seat.

        Args:
            epoch: number of the epoch that ends.
            suspects: seats of processes whose connections refused this one.
        """
        reports = self.reports(epoch)
        silence_s, suspect_s = self._limits()
        refused = {*suspects, *(seat for report in reports.values() for seat in report.lost)}
        found = {}
        for seat, record in self.records.items():
            silent_s = self._silence.seconds[seat]
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
