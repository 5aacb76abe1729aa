"""Topologies that are the same in every round: graphs with one weight for each edge."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from bagua.topology.rounds import Edge, Round
from bagua.topology.topology import Topology


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
