"""Mixing weights with neighbours, over ranks or over hosts: by sending them, or by sending what has changed."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bagua import primitives
from bagua.algorithms.exchanges.fields import LEAST_CONTRACTION, Flight, How
from bagua.checks import check_flags
from bagua.comm import Communicator, ProcessGroup, Work
from bagua.compression import Codec, Metadata, check_codec
from bagua.errors import ConfigurationError
from bagua.topology import Complete, Hierarchical, Round, Topology, create, weighted_by_size


class Rounds:
    """The rounds of a topology over the ranks of a group, or over its hosts.

    Args:
        topology: who mixes with whom.
        group: its size and hosts.
        hierarchical: let the means of hosts mix. Hosts matter only if there are several, and some hold several ranks.

    Attributes:
        by_host: True if hosts matter.

    Raises:
        ConfigurationError: a round is not doubly stochastic over ranks, or the topology does not exist for this group.
    """

    def __init__(self, topology: Topology, group: ProcessGroup, *, hierarchical: bool) -> None:
        self.by_host = hierarchical and group.has_two_levels
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
    return edges is not None and (primitives.is_global_mean(mixing) or all(len(edge.ranks) < 3 for edge in edges))


@dataclass(frozen=True)
class Mix(How):
    """The weighted mean with neighbours: ``x_i <- sum_j W_ij x_j``. Each exchange is one round of a topology.

    Args:
        topology: a name, or a ``bagua.topology.Topology``.
        hierarchical: ranks of one host take their mean, and hosts mix with hosts, weighted by their sizes. With a
            single host, or a single rank on each, ranks mix with ranks.

    Example:
        >>> Mix("ring").uniform, Mix("complete").uniform
        (False, True)
    """

    topology: str | Topology = "ring"
    hierarchical: bool = False

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        create(self.topology)

    @property
    def uniform(self) -> bool:
        """Only if everyone takes the mean of everyone."""
        return isinstance(create(self.topology), Complete)

    def check(self, group: ProcessGroup) -> None:
        """Refuse topologies that do not exist for this group."""
        self.prepare(group)

    def prepare(self, group: ProcessGroup) -> Rounds:
        """The rounds."""
        return Rounds(create(self.topology), group, hierarchical=self.hierarchical)

    def blocking(self, group: ProcessGroup, prepared: Rounds) -> bool:
        """Only with several neighbours, or several hosts: then there are several calls, one after the other."""
        return not prepared.overlaps()

    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        """Mix; rounds of the topology are counted by exchanges."""
        rounds: Rounds = flight.prepared
        mixing = rounds.round(flight.round)
        if rounds.by_host:
            primitives.hierarchical_neighbour_average(flight.flat, mixing, group, flight.scratch)
            return None
        communicator = group.global_communicator
        return primitives.neighbour_average(
            flight.flat, mixing, communicator, flight.scratch, async_op=rounds.overlaps()
        )


@dataclass(frozen=True)
class DifferenceMix(How):
    """Mixing by compressed differences to what neighbours know already; see ``bagua.primitives.DifferenceExchange``.

    Args:
        topology: a name, or a ``bagua.topology.Topology``: the same in every round, and symmetric.
        codec: codec of the differences.
        hierarchical: as for ``Mix``.

    Raises:
        ConfigurationError: a topology that is not static, or a codec with which this cannot converge.
    """

    topology: str | Topology
    codec: Codec
    hierarchical: bool = False
    uniform = False  # Each rank ends with its own estimate.
    contraction = None  # What the codec loses of a difference comes with the next.

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        check_codec(self.codec)
        contraction = self.codec.contraction
        if contraction is not None and contraction < LEAST_CONTRACTION:
            raise ConfigurationError(
                "this codec would drop most of each update, which nothing feeds back: ranks become what was sent",
                argument="codec",
                expected=f"one that keeps at least {LEAST_CONTRACTION:.0%} of the square of any block, as MinMaxUInt8",
                seen=f"{self.codec!r}, which may keep {contraction:.2%}",
                advice="For fewer bits use DiLoCoAlgorithm, in which weights stay apart from what is sent.",
            )
        if not create(self.topology).static:
            raise ConfigurationError(
                "neighbours follow each other's changes, so they must stay the same",
                argument="topology",
                expected="a static one, as ring, torus or complete",
                seen=repr(self.topology),
                advice="Use DecentralizedAlgorithm for neighbours that change.",
            )

    def state(self) -> tuple[primitives.State, ...]:
        """Two estimates, which the first exchange starts."""
        return primitives.DifferenceExchange.state()

    def check(self, group: ProcessGroup) -> None:
        """Refuse topologies that do not exist for this group, or are not symmetric on it."""
        self.prepare(group)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse what the codec refuses."""
        self.codec.compressed_bytes(Metadata(0, torch.promote_types(dtype, torch.float32)))

    def prepare(self, group: ProcessGroup) -> tuple[bool, primitives.DifferenceExchange]:
        """Whether hosts matter, and the exchange."""
        rounds = Rounds(create(self.topology), group, hierarchical=self.hierarchical)
        if not rounds.over_ranks.round(group.size, 1, group.nodes).symmetric:
            raise ConfigurationError(
                "neighbours must give each other the same weight",
                argument="topology",
                expected="a symmetric one, as ring, torus or complete",
                seen=repr(self.topology),
            )
        return rounds.by_host, primitives.DifferenceExchange(rounds.round(1), self.codec)

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        """Send the compressed difference, and follow the neighbours'."""
        by_host, exchange = flight.prepared
        memory = flight.memory
        # What codecs make of the gaps between parameters is not saved, and must not matter.
        memory.clear_padding(flight.flat)
        if by_host:

            def between_hosts(total: torch.Tensor, leaders: Communicator) -> None:
                total.div_(group.local_size)
                exchange.run(total, leaders, flight.state, flight.step)

            primitives.on_leaders(flight.flat, group, between_hosts)
            if not group.inter_node_communicator:  # What this rank knew of others before is out of date.
                flight.state["started"].zero_()
        else:
            exchange.run(flight.flat, group.global_communicator, flight.state, flight.step)
        for name in ("estimate", "neighbours"):
            memory.clear_padding(flight.state[name])
