"""What algorithms have in common that mix weights with neighbours: who mixes with whom, over ranks or over hosts."""

from __future__ import annotations

import functools

import torch

from bagua.buckets import Bucket
from bagua.comm import ProcessGroup
from bagua.primitives import is_global_mean
from bagua.primitives.hierarchical import has_two_levels
from bagua.topology import Hierarchical, Round, Topology, weighted_by_size

__all__ = ["Mixing", "write_if_finite"]


class Mixing:
    """A topology over the ranks of a group, or over its hosts.

    Args:
        topology: who mixes with whom.
        group: its size and hosts.
        hierarchical: let the means of hosts mix. Hosts matter only if there are several,
            and some hold several ranks.

    Attributes:
        by_host: whether hosts matter.

    Raises:
        ConfigurationError: a round is not doubly stochastic over ranks, or the topology does
            not exist for this group.
    """

    def __init__(self, topology: Topology, group: ProcessGroup, *, hierarchical: bool) -> None:
        self.by_host = hierarchical and has_two_levels(group)
        self._topology = topology
        self._host_sizes = group.node_sizes
        self._size = group.size
        self._nodes = group.nodes
        self.over_ranks.check(group.size, group.nodes)
        self.round = functools.lru_cache(maxsize=64)(self._round)

    @property
    def over_ranks(self) -> Topology:
        """The topology as ranks see it."""
        return Hierarchical(self._topology) if self.by_host else self._topology

    def _round(self, number: int) -> Round:
        """Round ``number``, from 1: over hosts, weighted by their sizes, if hosts matter; else over ranks."""
        if self.by_host:
            return weighted_by_size(self._topology.round(len(self._host_sizes), number), self._host_sizes)
        return self._topology.round(self._size, number, self._nodes)

    def overlaps(self) -> bool:
        """Whether exchanges are one call each, which need not be waited for; judged by the first of them."""
        return not self.by_host and all(_is_one_call(self.round(number)) for number in range(1, 17))


def _is_one_call(mixing: Round) -> bool:
    edges = mixing.edges
    return edges is not None and (is_global_mean(mixing) or all(len(edge.ranks) < 3 for edge in edges))


def write_if_finite(bucket: Bucket, weights: torch.Tensor) -> None:
    """Make ``weights`` the weights of ``bucket``, unless there is an Inf or NaN in them.

    A neighbour whose weights are spoilt must not spoil these.

    Args:
        bucket: whose weights are written.
        weights: flat memory, laid out like the bucket.
    """
    finite = torch.isfinite(weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32)))
    if weights.device.type != "cpu":  # Reading the flag would wait for the device.
        kept = bucket.read_weights(torch.empty_like(weights))
        bucket.write_weights(torch.where(finite, weights, kept))
    elif finite or torch.isfinite(weights).all():
        bucket.write_weights(weights)
