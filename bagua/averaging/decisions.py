"""The decisions of a session: made once, read by all whom they concern, and then deleted."""

from __future__ import annotations

from typing import Any

from bagua.averaging.membership import Company
from bagua.comm import Board

__all__ = ["Decisions"]


class Decisions:
    """Cells of the board, one for each round and those who meet in it.

    Args:
        board: of the session.
        company: who has read what.
    """

    def __init__(self, board: Board, company: Company) -> None:
        self._board = board
        self._company = company
        self._passed: list[tuple[int, tuple[int, ...]]] = []

    def topic(self, number: int, meeting: tuple[int, ...]) -> str:
        """What round ``number`` of those who meet is called."""
        everyone = len(meeting) == len(self._company.names)
        return f"{number}/{'all' if everyone else '-'.join(map(str, meeting))}"

    def made(self, number: int, meeting: tuple[int, ...]) -> dict[str, Any] | None:
        """What was decided, or None."""
        found: dict[str, Any] | None = self._board.decided(self.topic(number, meeting))
        return found

    def make(self, number: int, meeting: tuple[int, ...], proposal: dict[str, Any]) -> dict[str, Any]:
        """What is decided: ``proposal``, unless somebody was first."""
        found: dict[str, Any] = self._board.decide(self.topic(number, meeting), proposal)
        return found

    def done_with(self, number: int, meeting: tuple[int, ...]) -> None:
        """This member has read the decision, and will not look at it again."""
        if len(meeting) > 1:
            self._passed.append((number, meeting))

    def forget(self) -> None:
        """Keep the board small: the first of those who met deletes what all have read."""
        company, kept = self._company, []
        for number, meeting in self._passed:
            others = [rank for rank in meeting if rank != company.rank and not company.gone(rank)]
            if others and others[0] < company.rank:
                continue  # Another one does it.
            if all(company.record(rank).round > number for rank in others):
                self._board.forget(self.topic(number, meeting))
            else:
                kept.append((number, meeting))
        self._passed = kept
