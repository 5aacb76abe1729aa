"""Rounds: who meets in each, what was decided about it, and how they went."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bagua.averaging.membership import MembershipView
from bagua.comm import Board
from bagua.topology import Complete, RandomMatching, Round, Topology, resolve


def topology_of(peer_selection_mode: str) -> Topology:
    """The topology that a mode stands for: ``all``, ``random_pair``, or the name of a topology.

    Raises:
        ConfigurationError: there is none.

    Example:
        >>> topology_of("all"), topology_of("shift_one"), topology_of("random_pair")
        (Complete(), ShiftOne(), RandomMatching(seed=0))
    """
    if peer_selection_mode == "random_pair":
        return RandomMatching()
    return resolve(peer_selection_mode, "peer_selection_mode")


class Schedule:
    """The members that one rank meets, round by round.

    In a topology that splits the ranks in each round, these are the ranks of its part. In
    any other one, pairs of neighbours are drawn in each round, so that no rank ever has to
    wait for more than one other.

    Args:
        topology: graph of the ranks.
        rank: this rank.
        nodes: index of the host of each rank.

    Example:
        >>> from bagua.topology import Ring, ShiftOne
        >>> [Schedule(ShiftOne(), 0, [0] * 4).members(number) for number in (0, 1, 2)]
        [(0, 2), (0, 3), (0, 2)]
        >>> {len(Schedule(Ring(), 0, [0] * 4).members(number)) for number in range(20)}
        {2}
    """

    def __init__(self, topology: Topology, rank: int, nodes: Sequence[int]) -> None:
        self._topology = topology
        self._rank = rank
        self._nodes = tuple(nodes)
        self.everyone = tuple(range(len(self._nodes)))
        self.pairwise = not isinstance(topology, Complete)
        self.members(0)  # A topology that does not exist for so many ranks is refused now.

    def members(self, number: int) -> tuple[int, ...]:
        """The ranks that meet in round ``number``, counted from 0, this one among them."""
        if not self.pairwise:
            return self.everyone
        round_ = self._topology.round(len(self._nodes), number + 1, self._nodes)
        if round_.edges is None:
            round_ = _pairs_of_neighbours(round_, number)
        edge = round_[self._rank].edge
        assert edge is not None
        return edge.ranks


def _pairs_of_neighbours(graph: Round, number: int) -> Round:
    """A matching in ``graph`` that cannot be extended, another one for each ``number``."""
    pairs = {
        (min(rank, other), max(rank, other))
        for rank in range(graph.size)
        for other in (*graph[rank].destinations, *(source for source, _ in graph[rank].sources))
    }
    drawn = sorted(pairs)
    random.Random(number).shuffle(drawn)  # noqa: S311 - no secret
    free, chosen = set(range(graph.size)), []
    for pair in drawn:
        if free.issuperset(pair):
            free -= set(pair)
            chosen.append(pair)
    return Round.matching(graph.size, chosen)


class Decisions:
    """Cells of the board, one for each round and those who meet in it.

    Args:
        board: records and decisions of the session.
        view: who has read what.
    """

    def __init__(self, board: Board, view: MembershipView) -> None:
        self._board = board
        self._view = view
        self._passed: list[tuple[int, tuple[int, ...]]] = []

    def topic(self, number: int, meeting: tuple[int, ...]) -> str:
        """What round ``number`` of those who meet is called."""
        everyone = len(meeting) == len(self._view.names)
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
        view, kept = self._view, []
        for number, meeting in self._passed:
            others = [rank for rank in meeting if rank != view.rank and not view.gone(rank)]
            if others and others[0] < view.rank:
                continue  # Another one does it.
            if all(view.record(rank).round > number for rank in others):
                self._board.forget(self.topic(number, meeting))
            else:
                kept.append((number, meeting))
        self._passed = kept


@dataclass(frozen=True)
class AveragingStatus:
    """What a user watches to know that averaging works.

    Attributes:
        state: ``idle`` (before the first step, or on one rank), ``warming up``, ``averaging``,
            ``paused`` (after ``abort``), or ``alone`` (no other rank is left to average with).
        rounds: averages that this rank has received since averaging began or was resumed.
        age_steps: steps since this rank last took in an average; None if it never did.
        age_ms: the same in milliseconds.
        sent_bytes: bytes of the weights that went into exchanges.
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
