"""Topologies that only tests need: of functions and matrices, with edges that are no means."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bagua.topology import Edge, Round, Topology

Matrix = torch.Tensor | Sequence[Sequence[float]]
#: Of the number of ranks, the round, and the host of each rank.
Making = Callable[[int, int, tuple[int, ...]], Round | list[Edge] | Matrix]


@dataclass(frozen=True)
class Made(Topology):
    """Rounds that a function makes, of edges or of a matrix."""

    make: Making
    symmetric: bool = False
    static: bool = False

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        made = self.make(size, step, nodes)
        if isinstance(made, Round):
            return made
        if isinstance(made, list) and isinstance(made[0], Edge):
            return Round.from_edges(size, made)
        return Round.from_matrix(made)

    def __repr__(self) -> str:
        # Ranks compare this; an address in memory would differ from rank to rank.
        return f"Made({getattr(self.make, '__name__', 'function')})"


def uneven_edges(size: int, number: int, nodes: tuple[int, ...]) -> list[Edge]:
    """All but one mix, with a weight that is no mean; one rests, in turns."""
    resting = number % size
    others = tuple(rank for rank in range(size) if rank != resting)
    return [Edge((resting,), 1.0), Edge(others, 0.5)]


def one_way(size: int, number: int, nodes: tuple[int, ...]) -> torch.Tensor:
    """A matrix that is not symmetric: each takes from its left neighbour only."""
    return (torch.eye(size, dtype=torch.float64) + torch.eye(size, dtype=torch.float64).roll(1, 0)) / 2


def star(size: int, number: int, nodes: tuple[int, ...]) -> torch.Tensor:
    """Rank 0 in the middle, so that ranks have other numbers of neighbours; every weight is 1/n."""
    weights = torch.eye(size, dtype=torch.float64)
    weights[0], weights[:, 0] = 1 / size, 1 / size
    weights += torch.diag(1 - weights.sum(dim=1))
    return weights


def drawn_pairs(size: int, number: int, nodes: tuple[int, ...]) -> Round:
    """Random pairs, drawn anew for each round."""
    order = random.Random(f"{size}/{number}").sample(range(size), size)
    return Round.matching(size, list(zip(order[::2], order[1::2], strict=False)))


def graph(matrix: Matrix, *, symmetric: bool = False) -> Made:
    """The same matrix in every round."""
    return Made(lambda size, number, nodes: matrix, symmetric=symmetric, static=True)


ONE_WAY = Made(one_way, static=True)
STAR = Made(star, symmetric=True, static=True)
DRAWN_PAIRS = Made(drawn_pairs, symmetric=True)
UNEVEN_EDGES = Made(uneven_edges, symmetric=True)
