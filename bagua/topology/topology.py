"""One round of mixing: who gives what weight to whom.

Then what a topology is, and how fast ranks come together on it.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bagua.checks import check_whole
from bagua.errors import ConfigurationError

#: How far a sum of weights may be from 1. Weights are float64; fractions such as 1/3 are not exact.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Edge:
    """Ranks that mix with each other and with no other rank.

    Each keeps ``weight`` of itself and takes an equal part of the rest from every other:
    ``x_i <- w x_i + (1 - w) / (|R| - 1) sum_{j != i} x_j``. A rank that rests is an edge of
    one with weight 1.

    Args:
        ranks: who, in ascending order.
        weight: part that a rank keeps of itself, from 0 to 1.

    Example:
        >>> Edge((0, 1, 2), weight=0.5).other_weight
        0.25
    """

    ranks: tuple[int, ...]
    weight: float

    @property
    def other_weight(self) -> float:
        """What a rank takes from each other rank of the edge; 0 for an edge of one."""
        others = len(self.ranks) - 1
        return (1.0 - self.weight) / others if others else 0.0

    @property
    def is_mean(self) -> bool:
        """Whether all ranks of the edge end with their common mean."""
        return abs(self.weight * len(self.ranks) - 1.0) < TOLERANCE


@dataclass(frozen=True)
class Neighbours:
    """What one rank does in one round: ``x <- own_weight x + sum_j weight_j x_j``.

    Attributes:
        own_weight: part that the rank keeps of itself.
        sources: (rank, weight) of those whose values it takes, in ascending order.
        destinations: ranks that take its values, in ascending order. The same ranks as in
            ``sources`` if the round is symmetric.
        edge: the edge that the rank belongs to, if the round splits the ranks into edges.
    """

    own_weight: float
    sources: tuple[tuple[int, float], ...] = ()
    destinations: tuple[int, ...] = ()
    edge: Edge | None = None


@dataclass(frozen=True)
class Turn:
    """One message out and one in, at the same time.

    Attributes:
        source: the rank whose values come in; None if there is none.
        weight: with which they are taken.
        destination: the rank to which the own values go; None if there is none.
    """

    source: int | None
    weight: float
    destination: int | None


@dataclass(frozen=True)
class Round:
    """One round of mixing on ``size`` ranks; made by ``from_edges``, ``matching``, ``from_rows`` or ``from_matrix``.

    ``round[rank]`` tells a rank what to do; ``matrix()`` is the mixing matrix ``W`` of
    ``x <- W x``, row ``i`` holding the weights with which rank ``i`` takes values.

    Attributes:
        size: number of ranks.
        edges: disjoint sets of ranks that cover all of them, each mixing for itself; None
            for a round that is no such partition.
        rows: for each rank, (rank, weight) of everyone it takes values from, itself
            included; None if ``edges`` say it.

    Example:
        >>> pair = Round.matching(3, [(0, 2)])
        >>> pair[1]
        Neighbours(own_weight=1.0, sources=(), destinations=(), edge=Edge(ranks=(1,), weight=1.0))
        >>> pair.matrix().tolist()
        [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
    """

    size: int
    edges: tuple[Edge, ...] | None = None
    rows: tuple[tuple[tuple[int, float], ...], ...] | None = None

    # Ways to make one.

    @classmethod
    def from_edges(cls, size: int, edges: Iterable[Edge]) -> Round:
        """A round in which every rank belongs to exactly one edge.

        Raises:
            ConfigurationError: a rank is in two edges, in none, or unknown, or a weight is not from 0 to 1.
        """
        found = [Edge(tuple(sorted(edge.ranks)), float(edge.weight)) for edge in edges]
        ordered = tuple(sorted(found, key=lambda edge: edge.ranks))
        members = sorted(rank for edge in ordered for rank in edge.ranks)
        if members != list(range(size)):
            raise ConfigurationError(
                "not every rank is in exactly one edge",
                argument="edges",
                expected=f"each of the ranks 0 to {size - 1} once",
                seen=[list(edge.ranks) for edge in ordered],
                advice="A rank that rests is an edge of its own: Edge((rank,), 1.0).",
            )
        for edge in ordered:
            _check_weight(edge.weight, edge.ranks)
            if len(edge.ranks) == 1 and edge.weight != 1.0:
                raise ConfigurationError(
                    f"rank {edge.ranks[0]} is alone and must keep all of itself",
                    argument="edges",
                    expected="weight 1.0",
                    seen=edge.weight,
                )
        return cls(size, edges=ordered)

    @classmethod
    def matching(cls, size: int, pairs: Iterable[tuple[int, int]]) -> Round:
        """A round in which pairs of ranks meet in the middle, and all others rest.

        Example:
            >>> [edge.ranks for edge in Round.matching(4, [(3, 0)]).edges]
            [(0, 3), (1,), (2,)]
        """
        edges = [Edge((min(pair), max(pair)), 0.5) for pair in pairs]
        paired = {rank for edge in edges for rank in edge.ranks}
        return cls.from_edges(size, edges + [Edge((rank,), 1.0) for rank in range(size) if rank not in paired])

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[int, float]]) -> Round:
        """A round from the weight that each rank gives to each rank, itself included; zeros may be left out."""
        return cls(
            len(rows), rows=tuple(tuple((rank, float(row[rank])) for rank in sorted(row) if row[rank]) for row in rows)
        )

    @classmethod
    def from_matrix(cls, matrix: torch.Tensor | Sequence[Sequence[float]]) -> Round:
        """A round from its mixing matrix.

        Raises:
            ConfigurationError: it is not square.
        """
        rows = torch.as_tensor(matrix, dtype=torch.float64, device="cpu")
        if rows.dim() != 2 or rows.shape[0] != rows.shape[1] or rows.shape[0] == 0:
            raise ConfigurationError(
                "a mixing matrix has one row and one column for each rank",
                argument="matrix",
                expected="a square matrix",
                seen=f"shape {list(rows.shape)}",
            )
        return cls.from_rows([dict(enumerate(row)) for row in rows.tolist()])

    # What it says.

    def __getitem__(self, rank: int) -> Neighbours:
        """What ``rank`` does in this round."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} of {self.size}")
        if self.edges is not None:
            edge = next(edge for edge in self.edges if rank in edge.ranks)
            others = tuple(other for other in edge.ranks if other != rank)
            return Neighbours(edge.weight, tuple((other, edge.other_weight) for other in others), others, edge)
        assert self.rows is not None
        own = dict(self.rows[rank]).get(rank, 0.0)
        sources = tuple((source, weight) for source, weight in self.rows[rank] if source != rank)
        takers = (
            other for other, row in enumerate(self.rows) if other != rank and any(rank == source for source, _ in row)
        )
        return Neighbours(own, sources, tuple(takers))

    def turns(self, rank: int) -> tuple[Turn, ...]:
        """The messages of ``rank``, at most one out and one in at a time.

        If every rank takes its turns in this order, no ranks wait for each other in a circle, whatever the
        graph: the earliest turn that is not over can always go on.

        Example:
            >>> Round.matching(4, [(0, 2)]).turns(2)
            (Turn(source=0, weight=0.5, destination=0),)
        """
        weights = dict(self[rank].sources)
        outgoing, incoming = self._schedule
        return tuple(
            Turn(incoming[rank].get(turn), weights.get(incoming[rank].get(turn, rank), 0.0), outgoing[rank].get(turn))
            for turn in sorted({*incoming[rank], *outgoing[rank]})
        )

    @functools.cached_property
    def _schedule(self) -> tuple[list[dict[int, int]], list[dict[int, int]]]:
        """For each rank, by number of the turn: to whom it sends, and from whom it receives."""
        messages = [(other, rank) for rank in range(self.size) for other, _ in self[rank].sources]
        # In the order of distances, graphs that look alike from every rank need as many turns as neighbours.
        messages.sort(key=lambda message: ((message[1] - message[0]) % self.size, message[0]))
        outgoing: list[dict[int, int]] = [{} for _ in range(self.size)]
        incoming: list[dict[int, int]] = [{} for _ in range(self.size)]
        for source, destination in messages:
            turn = next(turn for turn in itertools.count() if turn not in {*outgoing[source], *incoming[destination]})
            outgoing[source][turn] = destination
            incoming[destination][turn] = source
        return outgoing, incoming

    def matrix(self) -> torch.Tensor:
        """The mixing matrix, shape (size, size), float64."""
        matrix = torch.zeros(self.size, self.size, dtype=torch.float64, device="cpu")
        for edge in self.edges or ():
            ranks = torch.tensor(edge.ranks, device="cpu")
            matrix[ranks[:, None], ranks] = edge.other_weight
            matrix[ranks, ranks] = edge.weight
        for rank, row in enumerate(self.rows or ()):
            for source, weight in row:
                matrix[rank, source] = weight
        return matrix

    @property
    def symmetric(self) -> bool:
        """Whether any two ranks give each other the same weight."""
        matrix = self.matrix()
        return bool((matrix - matrix.T).abs().max() <= TOLERANCE)


def check_round(round_: Round, *, size: int | None = None, symmetric: bool = False, name: str = "the topology") -> None:
    """Accept a round only if its mixing matrix is doubly stochastic.

    Rows that sum to 1 keep an agreement that was reached; columns that sum to 1 keep the
    mean of all ranks.

    Args:
        round_: round to check.
        size: the number of ranks that it must be for; None for any.
        symmetric: demand a symmetric matrix, too.
        name: name of the topology in messages.

    Raises:
        ConfigurationError: a weight is not from 0 to 1, a row or a column does not sum to
            1, or the matrix is not symmetric; the message names the first one.

    Example:
        >>> check_round(Round.from_matrix([[0.5, 0.5], [0.5, 0.5]]))
        >>> check_round(Round.from_matrix([[0.5, 0.5], [0.25, 0.75]]))
        Traceback (most recent call last):
        bagua.errors.ConfigurationError: the weights given to rank 0 by all ranks of the topology do not sum to 1 \
(argument topology, expected 1.0, seen 0.75)
    """
    if size is not None and round_.size != size:
        raise _invalid(f"{name} is for another number of ranks", size, round_.size)
    for rank, row in enumerate(round_.rows or ()):
        for source, weight in row:
            if not 0 <= source < round_.size:
                raise _invalid(f"rank {rank} of {name} takes values of an unknown rank", f"below {round_.size}", source)
            _check_weight(weight, (source, rank))
    matrix = round_.matrix()
    for rank, total in enumerate(matrix.sum(dim=1).tolist()):
        if abs(total - 1.0) > TOLERANCE:
            raise _invalid(f"the weights that rank {rank} of {name} gives do not sum to 1", 1.0, round(total, 9))
    for rank, total in enumerate(matrix.sum(dim=0).tolist()):
        if abs(total - 1.0) > TOLERANCE:
            raise _invalid(
                f"the weights given to rank {rank} by all ranks of {name} do not sum to 1", 1.0, round(total, 9)
            )
    if symmetric and (matrix - matrix.T).abs().max() > TOLERANCE:
        first, second = (int(index) for index in (matrix - matrix.T).abs().gt(TOLERANCE).nonzero()[0])
        raise _invalid(
            f"{name} is not symmetric between ranks {first} and {second}",
            f"equal weights {matrix[first, second]:g}",
            f"{matrix[second, first]:g}",
        )


def _invalid(problem: str, expected: object, seen: object) -> ConfigurationError:
    return ConfigurationError(problem, argument="topology", expected=expected, seen=seen)


def _check_weight(weight: float, ranks: Sequence[int]) -> None:
    if not (math.isfinite(weight) and -TOLERANCE <= weight <= 1.0 + TOLERANCE):
        raise _invalid(f"a weight between ranks {list(ranks)} cannot be used", "a number from 0 to 1", weight)


Nodes = Sequence[int]


class Topology(ABC):
    """Who mixes with whom in which round: a pure function of the number of ranks and the number of the round.

    Subclasses are frozen dataclasses: they print as their constructor call, and can be
    compared, hashed and pickled. No communication happens here, and no rank is special.
    """

    @property
    def symmetric(self) -> bool:
        """Whether any two ranks give each other the same weight, in each round."""
        return True

    @property
    def static(self) -> bool:
        """Whether all rounds are equal."""
        return False

    def round(self, size: int, step: int, nodes: Nodes | None = None) -> Round:
        """What happens in one round.

        Args:
            size: number of ranks.
            step: number of the round, counted from 1.
            nodes: index of the host of each rank, for topologies that look at hosts. None
                means that each rank has a host of its own.

        Raises:
            ConfigurationError: the topology does not exist for this size or these hosts.
        """
        check_whole(1, size=size, step=step)
        hosts = tuple(range(size)) if nodes is None else tuple(nodes)
        if len(hosts) != size:
            raise ConfigurationError(
                "each rank has a host", argument="nodes", expected=f"{size} host indices", seen=f"{len(hosts)}"
            )
        return self._round(size, step, hosts)

    @abstractmethod
    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        """What happens in round ``step``; arguments have been checked."""

    def matrix(self, size: int, step: int = 1, nodes: Nodes | None = None) -> torch.Tensor:
        """The mixing matrix of one round, shape (size, size), float64; arguments as for ``round``."""
        return self.round(size, step, nodes).matrix()

    def period(self, size: int, nodes: Nodes | None = None) -> int | None:
        """After how many rounds everything repeats; None if it never does."""
        return 1 if self.static else None

    def check(self, size: int, nodes: Nodes | None = None, *, rounds: int = 16) -> None:
        """Look at up to ``rounds`` rounds: is each doubly stochastic, and symmetric and static if that is claimed?

        Raises:
            ConfigurationError: one is not, or there is none for this size or these hosts.
        """
        first = self.round(size, 1, nodes)
        for step in range(1, min(rounds, self.period(size, nodes) or rounds) + 1):
            check_round(self.round(size, step, nodes), size=size, symmetric=self.symmetric, name=repr(self))
        if self.static and self.round(size, 2, nodes) != first:
            raise ConfigurationError(
                f"{self!r} claims to be static and changes",
                argument="topology",
                expected="equal rounds",
                seen="another round 2 than round 1",
            )


def consensus_rate(topology: Topology, size: int, nodes: Nodes | None = None, *, rounds: int | None = None) -> float:
    """The factor by which a round of mixing shrinks the ranks' disagreement, averaged over several rounds.

    ``||W_k ... W_1 - J||_2 ^ (1 / k)``.

    Args:
        topology: who mixes with whom.
        size: number of ranks.
        nodes: index of the host of each rank.
        rounds: how many; None for one period, or 64 if there is none or it is longer.

    Returns:
        0 for exact consensus within these rounds, 1 if some disagreement is never touched.

    Example:
        >>> from bagua.topology import OnePeerExponential
        >>> consensus_rate(OnePeerExponential(), 8)
        0.0
    """
    count = rounds or min(topology.period(size, nodes) or 64, 64)
    disagreement = torch.eye(size, dtype=torch.float64, device="cpu") - 1.0 / size
    logarithm = 0.0
    for step in range(1, count + 1):
        disagreement = topology.matrix(size, step, nodes) @ disagreement
        left = float(torch.linalg.matrix_norm(disagreement, ord=2))
        if left < 1e-12:  # Only rounding errors are left.
            return 0.0
        logarithm += math.log(left)
        disagreement /= left
    return math.exp(logarithm / count)
