"""Who takes part, as pure functions of what is written: epochs, reports, and the rule for the next epoch.

An epoch is a cell of the store that is written once: the process that comes first decides, and everybody acts on what
is written. A member whose exchange failed says so once, in a report, and obeys nothing but the next epoch from then on.
So no order of events lets two members apply different results for one exchange:

* A result is applied after a barrier, hence only if all members of the epoch hold it. Through a bucket a cell closes
  each exchange instead: who has the result claims that it counts, who stops claims that it does not, and all do what
  the cell says. Who stops without a result that counts reports that it has no state, and is left out.
* The next epoch says up to which exchange results count: ``base``, the last one that all who stay hold. What somebody
  has applied, all hold, so no member has applied more than that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

_NOBODY: Mapping[int, int] = {}


class Epoch(NamedTuple):
    """Who takes part from one change to the next.

    Attributes:
        number: from 1, without gaps.
        members: seats, in ascending order.
        base: number of the last exchange whose result counts.
        newcomers: those of the members that have yet to receive the state. Who had it before it came is not one.
        why: reason for the change, for people.
    """

    number: int
    members: tuple[int, ...]
    base: int = 0
    newcomers: tuple[int, ...] = ()
    why: str = ""

    @property
    def donors(self) -> tuple[int, ...]:
        """Members that have the state when it begins; each of them can give it."""
        return tuple(seat for seat in self.members if seat not in self.newcomers)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Epoch:
        """From what the store keeps, which is its dictionary."""
        return cls(found["number"], tuple(found["members"]), found["base"], tuple(found["newcomers"]), found["why"])


class StopReport(NamedTuple):
    """What a member says, once in an epoch, when it stops taking part in it.

    Attributes:
        epoch: number of the epoch.
        held: number of the last exchange whose result it holds.
        resting: it is between two steps, with everything applied, and not in an exchange.
        complete: it has the state. Who has not has no say: a newcomer, or one that misses a result that counts.
        lost: seats whose connections refused it.
    """

    epoch: int
    held: int = 0
    resting: bool = False
    complete: bool = True
    lost: tuple[int, ...] = ()


class Standing(NamedTuple):
    """How far one member has come. Each method returns the standing after an event.

    Attributes:
        seat: seat of the member.
        epoch: epoch that it takes part in.
        entered: number of the last exchange that it has begun.
        held: number of the last exchange whose result it holds.
        applied: number of the last exchange whose result is part of its state.
        report: report that it has made in this epoch; None while it takes part.

    Example:
        >>> alone = Standing(0, Epoch(1, (0, 1)))
        >>> alone.enter().hold().stop().follow(Epoch(2, (0,), base=1)).applied
        1
    """

    seat: int
    epoch: Epoch
    entered: int = 0
    held: int = 0
    applied: int = 0
    report: StopReport | None = None

    @classmethod
    def of_newcomer(cls, seat: int, epoch: Epoch) -> Standing:
        """That of a member that has just received the state."""
        return cls(seat, epoch, epoch.base, epoch.base, epoch.base)

    def enter(self) -> Standing:
        """The next exchange begins."""
        assert self.report is None, self
        assert self.entered == self.held == self.applied, self
        return self._replace(entered=self.entered + 1)

    def hold(self) -> Standing:
        """The result of the exchange is there."""
        assert self.report is None, self
        assert self.held == self.entered - 1, self
        return self._replace(held=self.entered)

    def apply(self) -> Standing:
        """All members hold the result."""
        assert self.report is None, self
        assert self.applied == self.held - 1, self
        return self._replace(applied=self.held)

    def stop(self, *, resting: bool = False, lost: Collection[int] = (), complete: bool = True) -> Standing:
        """It takes part in this epoch no more."""
        if self.report is not None:
            return self
        return self._replace(report=StopReport(self.epoch.number, self.held, resting, complete, tuple(sorted(lost))))

    def follow(self, epoch: Epoch) -> Standing:
        """The next epoch was written, and this member is in it: results up to its base count, and no others."""
        assert self.report is not None, self
        assert epoch.number == self.epoch.number + 1, (self, epoch)
        assert self.seat in epoch.members, (self, epoch)
        assert self.applied <= epoch.base <= self.held, (self, epoch)
        return Standing(self.seat, epoch, epoch.base, epoch.base, epoch.base)


def first_epoch(waiting: Sequence[int]) -> Epoch:
    """The first epoch: the state of the lowest seat becomes that of all."""
    seats = tuple(sorted(waiting))
    return Epoch(1, seats, newcomers=seats[1:], why=f"{_seats(seats)} began together")


def next_epoch(
    epoch: Epoch,
    reports: Mapping[int, StopReport],
    gone: Mapping[int, str],
    waiting: Sequence[int] = (),
    minimum: int | None = None,
    left: Collection[int] = (),
    ready: Mapping[int, int] = _NOBODY,
) -> Epoch | str:
    """The epoch that follows ``epoch``, or why there is none yet.

    Args:
        epoch: epoch of all members that report.
        reports: reports of its members in this epoch, by seat.
        gone: why, for each seat that is not waited for.
        waiting: seats that want to join, and receive the state then.
        minimum: members that may go on; None for more than half of the epoch.
        left: those of ``gone`` that went on purpose: no member misses them.
        ready: seats that want to join and receive the state before: number of the exchange whose state each has.

    Example:
        >>> before = Epoch(3, (0, 1, 2), base=7)
        >>> after = next_epoch(before, {0: StopReport(3, 9), 2: StopReport(3, 8)}, {1: "it died"})
        >>> after.members, after.base
        ((0, 2), 8)
        >>> next_epoch(before, {0: StopReport(3, 9)}, {1: "it died"})
        'waiting for seat 2'
    """
    missing = [seat for seat in epoch.members if seat not in reports and seat not in gone]
    if missing:
        return f"waiting for {_seats(missing)}"
    staying = [seat for seat in epoch.members if seat in reports and reports[seat].complete and seat not in gone]
    refusal = _refusal(epoch, reports, staying, gone, {*waiting, *ready}, minimum, left)
    if refusal:
        return refusal
    base = min(reports[seat].held for seat in staying)
    at_rest = all(reports[seat].resting for seat in staying)
    newcomers = tuple(sorted(set(waiting) - set(staying))) if at_rest else ()
    come = sorted({*newcomers, *(seat for seat, has in ready.items() if has == base and seat not in staying)})
    reasons = [f"seat {seat} is not in it: {gone[seat]}" for seat in epoch.members if seat in gone]
    reasons += [f"{_seats(come)} came"] if come else []
    reasons += [] if reasons else ["an exchange failed, and no member is lost"]
    return Epoch(epoch.number + 1, tuple(sorted([*staying, *come])), base, newcomers, "; ".join(reasons))


def _voters(epoch: Epoch, reports: Mapping[int, StopReport]) -> list[int]:
    """Members of which more than half must stay: those who have the state, as far as anybody can tell.

    Newcomers have it when an exchange of the epoch has a result. Those who begin together count from the beginning.
    """
    all_have_it = epoch.number == 1 or any(report.held > epoch.base for report in reports.values())
    sure = [seat for seat in epoch.members if all_have_it or seat in epoch.donors or seat in reports]
    return [seat for seat in sure if seat not in reports or reports[seat].complete]


def _refusal(
    epoch: Epoch,
    reports: Mapping[int, StopReport],
    staying: Sequence[int],
    gone: Mapping[int, str],
    waiting: Collection[int],
    minimum: int | None,
    left: Collection[int],
) -> str:
    """Why ``staying`` must not go on; nothing if they may."""
    lost = "; ".join(f"seat {seat}: {why}" for seat, why in gone.items() if seat in epoch.members) or "none is lost"
    if not staying:
        return f"no member that is left has the state ({lost})"
    had_state = [seat for seat in _voters(epoch, reports) if seat not in left]
    if minimum is None:
        if 2 * len(staying) > len(had_state):
            return ""
        return f"{_seats(staying)} are not more than half of {_seats(had_state)} ({lost})"
    wanted = min(minimum, len(had_state)) if left else minimum
    if len({*staying, *waiting}) >= wanted:
        return ""
    return f"{_seats(staying)} and {len(waiting)} that wait are fewer than {wanted} ({lost})"


def _seats(seats: Sequence[int]) -> str:
    return f"seat{'s' if len(seats) != 1 else ''} {', '.join(map(str, seats))}"
