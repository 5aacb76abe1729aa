"""Training by gossip: each rank mixes its weights with those of a few others."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.gossip import Mix
from bagua.algorithms.exchanges.values import Replace, Weights
from bagua.checks import check_flags, check_whole
from bagua.topology import Topology, create


@dataclass(frozen=True)
class DecentralizedAlgorithm(ByHost):
    """Mix weights with neighbours while gradients are computed: ``x_i <- sum_j W_ij x_j - u_i(x_i)``.

    ``u_i`` is what the optimizer makes of this rank's own gradient. The weights before the
    step are exchanged during the backward pass, so the exchange costs time only where it
    takes longer than that.

    Args:
        hierarchical: ranks of one host take their mean, and hosts mix with hosts, weighted by
            their sizes. With a single host, or a single rank on each, ranks mix with ranks.
        peer_selection_mode: ``all``: everyone takes the mean of everyone. ``shift_one``: pairs,
            others in each exchange. Or another name of a topology, or a
            ``bagua.topology.Topology``.
        communication_interval: number of steps from one exchange to the next; the first step has one.

    Raises:
        ConfigurationError: there is no such topology, or the interval is no integer >= 1.

    Example:
        >>> DecentralizedAlgorithm(peer_selection_mode="shift_one")
        DecentralizedAlgorithm(hierarchical=True, peer_selection_mode='shift_one', communication_interval=1)

    Paper: Lian et al., Can decentralized algorithms outperform centralized algorithms?, 2017.
    """

    hierarchical: bool = True
    peer_selection_mode: str | Topology = "all"
    communication_interval: int = 1

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        check_whole(1, communication_interval=self.communication_interval)
        create(self.peer_selection_mode, "peer_selection_mode")

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Send the weights as they are before this step; the optimizer will step from the mean."""
        return (
            Exchange(
                Weights(),
                Every(self.communication_interval, offset=1),
                Mix(self.peer_selection_mode, self.hierarchical),
                Replace(),
                at="backward begins",
            ),
        )


DecentralizedAlgorithmImpl = bound_form(DecentralizedAlgorithm)
