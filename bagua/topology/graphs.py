"""Topologies that are the same in every round: graphs with one weight for each edge."""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.checks import check_kind, check_numbers
from bagua.errors import ConfigurationError
from bagua.topology.base import Topology
from bagua.topology.rounds import Edge, Round, check_round


def metropolis(neighbours: Sequence[set[int]]) -> Round:
    """Weights for any undirected graph: ``w_ij = 1 / (1 + max(degree_i, degree_j))``, the rest for oneself.

    Symmetric and doubly stochastic on every graph; ``1 / (1 + degree)`` where all degrees are equal.

    Args:
        neighbours: neighbours of each rank.

    Example:
        >>> metropolis([{1}, {0, 2}, {1}]).rows[1]
        ((0, 0.3333333333333333), (1, 0.33333333333333337), (2, 0.3333333333333333))

    Paper: Xiao and Boyd, Fast linear iterations for distributed averaging, 2004.
    """
    rows = []
    for rank, around in enumerate(neighbours):
        row = {other: 1.0 / (1 + max(len(around), len(neighbours[other]))) for other in sorted(around)}
        row[rank] = 1.0 - sum(row.values())
        rows.append(row)
    return Round.from_rows(rows)


class _Graph(Topology):
    static = True

    @abstractmethod
    def _neighbours(self, size: int) -> list[set[int]]: ...

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        return metropolis([around - {rank} for rank, around in enumerate(self._neighbours(size))])


@dataclass(frozen=True)
class Complete(Topology):
    """All ranks take the mean of all ranks. Consensus after one round.

    Example:
        >>> Complete().matrix(2).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    static = True

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        return Round.from_edges(size, [Edge(tuple(range(size)), 1.0 / size)])


@dataclass(frozen=True)
class Ring(_Graph):
    """Each rank takes a third of both neighbours; two ranks take half of each other.

    Spectral gap ``2/3 (1 - cos(2 pi / n))``.

    Example:
        >>> Ring().round(5, 1)[0].sources
        ((1, 0.3333333333333333), (4, 0.3333333333333333))
    """

    def _neighbours(self, size: int) -> list[set[int]]:
        return [{(rank - 1) % size, (rank + 1) % size} for rank in range(size)]


@dataclass(frozen=True)
class Star(_Graph):
    """Rank 0 in the middle; every weight is ``1/n``. Spectral gap ``1/n``.

    Example:
        >>> Star().round(4, 1)[2].sources
        ((0, 0.25),)
    """

    def _neighbours(self, size: int) -> list[set[int]]:
        return [set(range(1, size))] + [{0} for _ in range(1, size)]


@dataclass(frozen=True)
class Hypercube(_Graph):
    """Ranks whose numbers differ in one bit are neighbours.

    On ``2^d`` ranks all weights are ``1 / (1 + d)`` and the spectral gap is ``2 / (1 + d)``. On other sizes the
    corners that do not exist are left out.

    Example:
        >>> [rank for rank, _ in Hypercube().round(8, 1)[0].sources]
        [1, 2, 4]
    """

    def _neighbours(self, size: int) -> list[set[int]]:
        bits = range((size - 1).bit_length())
        return [{rank ^ (1 << bit) for bit in bits if rank ^ (1 << bit) < size} for rank in range(size)]


@dataclass(frozen=True)
class Torus(_Graph):
    """A grid whose opposite sides touch; four neighbours, each of weight 1/5. A prime number of ranks is a ring.

    Args:
        rows: number of rows of the grid; None for the grid that is nearest to a square.

    Example:
        >>> [rank for rank, _ in Torus().round(9, 1)[0].sources]
        [1, 2, 3, 6]
    """

    rows: int | None = None

    def _neighbours(self, size: int) -> list[set[int]]:
        rows = self.rows
        if rows is None:
            rows = max(count for count in range(1, math.isqrt(size) + 1) if size % count == 0)
        if rows < 1 or size % rows:
            raise ConfigurationError(
                f"{self!r} does not exist for this number of ranks",
                argument="size",
                expected=f"a multiple of {rows}" if rows > 0 else "at least one row",
                seen=size,
            )
        columns = size // rows
        return [_around(rank // columns, rank % columns, rows, columns) for rank in range(size)]


def _around(row: int, column: int, rows: int, columns: int) -> set[int]:
    vertical = {(row + shift) % rows * columns + column for shift in (-1, 1)}
    return vertical | {row * columns + (column + shift) % columns for shift in (-1, 1)}


@dataclass(frozen=True)
class Exponential(Topology):
    """Each rank takes values of the ranks 1, 2, 4, ... before it: few neighbours, and fast. Not symmetric.

    With ``t`` the number of powers of two below ``n``, all weights are ``1 / (1 + t)``. The
    spectral gap is ``2 / (1 + t)`` for even ``n`` and at least that for odd ``n``.

    Example:
        >>> Exponential().round(8, 1)[0]
        Neighbours(own_weight=0.25, sources=((4, 0.25), (6, 0.25), (7, 0.25)), destinations=(1, 2, 4), edge=None)

    Paper: Ying et al., Exponential graph is provably efficient for decentralized deep training, 2021.
    """

    symmetric = False  # Values flow in one direction only.
    static = True

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        distances = [1 << power for power in range((size - 1).bit_length())]
        weight = 1.0 / (1 + len(distances))
        return Round.from_rows(
            [{rank: weight, **{(rank - distance) % size: weight for distance in distances}} for rank in range(size)]
        )


@dataclass(frozen=True)
class ErdosRenyi(_Graph):
    """A random graph, drawn once, the same on every rank: any two ranks are neighbours with some probability.

    Args:
        probability: probability of an edge; None for ``2 ln(n) / n``, twice the threshold above which such graphs hang
            together.
        seed: another number, another graph.

    Graphs that do not hang together are drawn again.

    Example:
        >>> ErdosRenyi(probability=1.0).matrix(2).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    probability: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.probability is not None:
            check_numbers(
                lambda probability: 0 <= probability <= 1, "from 0 to 1, or None", probability=self.probability
            )
        check_kind(int, "a whole number", seed=self.seed)

    def _neighbours(self, size: int) -> list[set[int]]:
        probability = self.probability
        if probability is None:
            probability = min(1.0, 2.0 * math.log(size) / size)
        source = random.Random(f"{self.seed}/{size}")  # noqa: S311 - no secret
        for _ in range(1000):
            around = _draw(size, probability, source)
            if _connected(around):
                return around
        raise ConfigurationError(
            f"{self!r} found no graph that holds {size} ranks together",
            argument="size",
            expected="a larger probability",
            seen=probability,
        )


def _draw(size: int, probability: float, source: random.Random) -> list[set[int]]:
    around: list[set[int]] = [set() for _ in range(size)]
    for rank in range(size):
        for other in range(rank):
            if source.random() < probability:
                around[rank].add(other)
                around[other].add(rank)
    return around


def _connected(around: Sequence[set[int]]) -> bool:
    reached, fresh = {0}, {0}
    while fresh:
        fresh = set().union(*(around[rank] for rank in fresh)) - reached
        reached |= fresh
    return len(reached) == len(around)


@dataclass(frozen=True)
class WeightedGraph(Topology):
    """A mixing matrix of your own, the same in every round.

    Args:
        weights: row ``i`` holds the weights with which rank ``i`` takes values.

    Raises:
        ConfigurationError: the matrix is not doubly stochastic.

    Example:
        >>> WeightedGraph([[0.75, 0.25], [0.25, 0.75]]).round(2, 1)[0].sources
        ((1, 0.25),)
    """

    weights: tuple[tuple[float, ...], ...]

    static = True

    @property
    def symmetric(self) -> bool:
        """Whether the matrix is."""
        return Round.from_matrix(self.weights).symmetric

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", tuple(tuple(float(weight) for weight in row) for row in self.weights))
        check_round(Round.from_matrix(self.weights), name="this graph")

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        if size != len(self.weights):
            raise ConfigurationError(
                "this graph is for another number of ranks", argument="size", expected=len(self.weights), seen=size
            )
        return Round.from_matrix(self.weights)
