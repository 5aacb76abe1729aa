"""Who mixes with whom: topologies as pure functions of the number of ranks and of the round."""

from bagua.topology.base import Topology, consensus_rate
from bagua.topology.graphs import Complete, Ring, Torus
from bagua.topology.hosts import AlternatingExponentialRing, Hierarchical, ranks_by_node, weighted_by_size
from bagua.topology.matchings import AlternatingRing, OnePeerExponential, ShiftOne
from bagua.topology.names import available, create, register
from bagua.topology.rounds import Edge, Neighbours, Round, Turn, check_round

__all__ = [
    "AlternatingExponentialRing",
    "AlternatingRing",
    "Complete",
    "Edge",
    "Hierarchical",
    "Neighbours",
    "OnePeerExponential",
    "Ring",
    "Round",
    "ShiftOne",
    "Topology",
    "Torus",
    "Turn",
    "available",
    "check_round",
    "consensus_rate",
    "create",
    "ranks_by_node",
    "register",
    "weighted_by_size",
]
