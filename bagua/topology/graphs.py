"""Topologies that know no hosts: graphs that are the same in every round, and others in which ranks meet in pairs."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from bagua.topology.topology import Edge, Nodes, Round, Topology


class _RegularGraph(Topology):
    """All ranks have as many neighbours, and give each of them and themselves the same weight."""

    static = True

    @abstractmethod
    def _neighbours(self, rank: int, size: int) -> set[int]: ...

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        around = [self._neighbours(rank, size) | {rank} for rank in range(size)]
        return Round.from_rows([dict.fromkeys(members, 1.0 / len(members)) for members in around])


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
class Ring(_RegularGraph):
    """Each rank takes a third of both neighbours; two ranks take half of each other.

    Spectral gap ``2/3 (1 - cos(2 pi / n))``.

    Example:
        >>> Ring().round(5, 1)[0].sources
        ((1, 0.3333333333333333), (4, 0.3333333333333333))
    """

    def _neighbours(self, rank: int, size: int) -> set[int]:
        return {(rank - 1) % size, (rank + 1) % size}


@dataclass(frozen=True)
class Torus(_RegularGraph):
    """A grid, as square as can be, whose opposite sides touch; four neighbours, each of weight 1/5.

    A prime number of ranks is a ring.

    Example:
        >>> [rank for rank, _ in Torus().round(9, 1)[0].sources]
        [1, 2, 3, 6]
    """

    def _neighbours(self, rank: int, size: int) -> set[int]:
        rows = max(count for count in range(1, math.isqrt(size) + 1) if size % count == 0)
        columns = size // rows
        row, column = divmod(rank, columns)
        vertical = {(row + shift) % rows * columns + column for shift in (-1, 1)}
        return vertical | {row * columns + (column + shift) % columns for shift in (-1, 1)}


@dataclass(frozen=True)
class AlternatingRing(Topology):
    """On a ring, each rank meets its right and its left neighbour in turns. Of an odd number one rests, in turns.

    Example:
        >>> [[edge.ranks for edge in AlternatingRing().round(4, step).edges] for step in (1, 2)]
        [[(0, 1), (2, 3)], [(0, 3), (1, 2)]]
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """Two rounds, or one for each rank of an odd number."""
        return size if size % 2 else min(size, 2)

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        ring = [(rank + step - 1) % size for rank in range(size)]
        return Round.matching(size, _pairs(ring))


@dataclass(frozen=True)
class ShiftOne(Topology):
    """Each rank of the first half meets all ranks of the second half, one after the other.

    In round ``k`` (from 1), with ``h = n / 2``, rank ``r < h`` meets ``h + (k - 1 + r) mod h``.
    Of an odd number one rank rests in each round, in turns.

    Example:
        >>> [[edge.ranks for edge in ShiftOne().round(4, step).edges] for step in (1, 2)]
        [[(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """As many rounds as the half has ranks."""
        return (size + 1) // 2

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        half = (size + 1) // 2
        met = ((rank, half + (step - 1 + rank) % half) for rank in range(half))
        return Round.matching(size, [(rank, other) for rank, other in met if other < size])


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In round ``k`` each rank meets one at distance ``2^i``, ``i = (k - 1) mod ceil(log2 n)``.

    On ``2^d`` ranks, consensus is exact after any ``d`` rounds in a row. On other sizes a
    rank may rest, another one in each cycle of rounds.

    Example:
        >>> [[edge.ranks for edge in OnePeerExponential().round(4, step).edges] for step in (1, 2)]
        [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]

    Paper: Ying et al., Exponential graph is provably efficient for decentralized deep training, 2021.
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """``log2 n`` rounds for a power of two; longer if ranks take turns in resting."""
        return _powers(size) * (math.lcm(2, size) if size & (size - 1) else 1)

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        cycle, power = divmod(step - 1, _powers(size))
        distance = 1 << power
        shift = cycle if size & (size - 1) else 0
        circles = math.gcd(size, distance)
        pairs: list[tuple[int, int]] = []
        for first in range(circles):
            length = size // circles
            pairs += _pairs([(first + (shift + position) * distance) % size for position in range(length)])
        return Round.matching(size, pairs)


def _pairs(ranks: list[int]) -> list[tuple[int, int]]:
    """Neighbours in the list, two by two; of an odd number the last one is left over."""
    return list(zip(ranks[::2], ranks[1::2], strict=False))


def _powers(size: int) -> int:
    """How many powers of two are smaller than ``size``; at least one, so that one rank has rounds, too."""
    return max((size - 1).bit_length(), 1)
