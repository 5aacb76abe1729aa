"""How fast ranks come together."""

from __future__ import annotations

import math

import torch

from bagua.topology.base import Nodes, Topology


def spectral_gap(matrix: torch.Tensor) -> float:
    """How much of the ranks' disagreement one round of mixing removes at least.

    ``1 - s_2``, with ``s_2`` the largest singular value of ``W - J``, ``J`` the matrix of the exact mean.
    For symmetric matrices this is 1 minus the second largest absolute eigenvalue.

    Args:
        matrix: shape (size, size), doubly stochastic.

    Returns:
        1 for consensus after one round, 0 if some disagreement is not touched at all.

    Example:
        >>> from bagua.topology import Ring
        >>> round(spectral_gap(Ring().matrix(4)), 6)
        0.666667
    """
    matrix = matrix.double()
    return 1.0 - float(torch.linalg.matrix_norm(matrix - 1.0 / matrix.shape[0], ord=2))


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
    disagreement = torch.eye(size, dtype=torch.float64) - 1.0 / size
    logarithm = 0.0
    for step in range(1, count + 1):
        disagreement = topology.matrix(size, step, nodes) @ disagreement
        left = float(torch.linalg.matrix_norm(disagreement, ord=2))
        if left < 1e-12:  # Only rounding errors are left.
            return 0.0
        logarithm += math.log(left)
        disagreement /= left
    return math.exp(logarithm / count)
