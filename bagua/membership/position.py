"""Which samples were trained on, which are on their way, and who draws which next: the same on all members.

The samples of all passes over the data lie in one order, by numbers from 0. Each member draws every n-th of those that
no island has drawn. What it has drawn is its own until an exchange to which it contributed counts; what belongs to a
member that is gone is drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Tally(NamedTuple):
    """What a member says of its samples in an exchange.

    Attributes:
        lane: number of the lane that it draws from.
        drawn: how many it has drawn since the last exchange.
        trained: on how many of all that are its own it has trained.
    """

    lane: int
    drawn: int = 0
    trained: int = 0


class Position(NamedTuple):
    """Where all members are in the data. Each method returns the position after an event.

    Attributes:
        first: number of the first sample that no island has drawn, and none before it is to be, but for those ``left``.
        left: numbers of samples before it that have to be drawn, in ascending order.
        lanes: how many members draw, those included that may come before the next exchange.
        own: numbers that each member has drawn and not contributed, in the order of training; by seat.
        again: how many samples belonged to members that were lost. Some may be trained on for the second time.

    Example:
        >>> begun = Position().of_members([0, 1])
        >>> [begun.number(0, turn) for turn in range(3)], [begun.number(1, turn) for turn in range(3)]
        ([0, 2, 4], [1, 3, 5])
        >>> after = begun.exchanged({0: Tally(0, drawn=3, trained=2), 1: Tally(1, drawn=2, trained=2)})
        >>> after.first, after.own
        (5, {0: (4,), 1: ()})
        >>> after.exchanged({1: Tally(1)}).left
        (4,)
    """

    first: int = 0
    left: tuple[int, ...] = ()
    lanes: int = 1
    own: Mapping[int, tuple[int, ...]] = {}
    again: int = 0

    def number(self, lane: int, turn: int) -> int:
        """The number that a member draws when it has drawn ``turn`` since the last exchange."""
        place = lane + turn * self.lanes
        return self.left[place] if place < len(self.left) else self.first + place - len(self.left)

    def lane_of(self, seat: int) -> int:
        """The lane of a member that contributed to the last exchange."""
        return sorted(self.own).index(seat)

    def of_members(self, seats: Sequence[int]) -> Position:
        """Those who begin."""
        return self._replace(own=dict.fromkeys(seats, ()), lanes=len(seats))

    def exchanged(self, said: Mapping[int, Tally], room: int = 0) -> Position:
        """An exchange counts.

        Args:
            said: reports of its members, by seat. Others are gone.
            room: how many newcomers there may be before the next one.
        """
        drawn = {seat: [self.number(one.lane, turn) for turn in range(one.drawn)] for seat, one in sorted(said.items())}
        taken = {number for numbers in drawn.values() for number in numbers}
        first = max([self.first, *(number + 1 for number in taken)])
        rest = [number for number in (*self.left, *range(self.first, first)) if number not in taken]
        lost = [number for seat, numbers in self.own.items() if seat not in said for number in numbers]
        own = {seat: (*self.own.get(seat, ()), *numbers)[said[seat].trained :] for seat, numbers in drawn.items()}
        return Position(first, tuple(sorted(rest + lost)), len(own) + room, own, self.again + len(lost))

    def without_members(self) -> Position:
        """No member goes on: what members had drawn and not contributed has to be drawn again."""
        left = sorted([*self.left, *(number for numbers in self.own.values() for number in numbers)])
        return Position(self.first, tuple(left), again=self.again)
