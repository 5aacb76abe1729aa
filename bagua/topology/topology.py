"""What a topology is, and how fast ranks come together on it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from bagua.checks import check_whole
from bagua.errors import ConfigurationError
from bagua.topology.rounds import Round, check_round

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
