"""Training by gossip: each rank mixes its weights with those of a few others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Traits
from bagua.algorithms.gossip import Mixing, write_if_finite
from bagua.buckets import Bucket
from bagua.checks import check_flags, check_whole
from bagua.comm import Group, ProcessGroup, Work
from bagua.primitives import hierarchical_neighbour_average, neighbour_average
from bagua.topology import Topology, create, resolve

__all__ = ["DecentralizedAlgorithm", "DecentralizedAlgorithmImpl"]


@dataclass(frozen=True)
class DecentralizedAlgorithm(Algorithm):
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
        communication_interval: exchange in every so-manieth step, beginning with the first.

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
        resolve(self.peer_selection_mode, "peer_selection_mode")


class DecentralizedAlgorithmImpl(AlgorithmImpl, declaration=DecentralizedAlgorithm):
    """``DecentralizedAlgorithm`` on a group."""

    traits = Traits(result="consensus", gathers_gradients=False, needs_gradients=False, exact_mean=True)
    options: DecentralizedAlgorithm

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        topology = create(self.options.peer_selection_mode)
        self._mixing = Mixing(topology, self.process_group, hierarchical=self.options.hierarchical)
        self._overlaps = self._mixing.overlaps()

    @property
    def blocking(self) -> bool:
        """Only with several neighbours, or several hosts: then there are several calls, one after the other."""
        return not self._overlaps

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        """In every ``communication_interval``-th step, from the first one on."""
        return step % self.options.communication_interval == 0

    def fill(self, bucket: Bucket, step: int) -> None:
        """The weights as they are before this step."""
        bucket.read_weights(bucket.buffer())

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Mix them; rounds of the topology are counted by exchanges."""
        mixing = self._mixing.round(step // self.options.communication_interval + 1)
        if self._mixing.by_host:
            hierarchical_neighbour_average(bucket.buffer(), mixing, group, bucket.buffer)
            return None
        return neighbour_average(
            bucket.buffer(), mixing, group.global_communicator, bucket.buffer, async_op=self._overlaps
        )

    def apply(self, bucket: Bucket, step: int) -> None:
        """The optimizer will step from the mean."""
        write_if_finite(bucket, bucket.buffer())
