"""Who mixes with whom: topologies as pure functions of the number of ranks and of the round."""

from bagua.topology.base import FunctionTopology, Topology
from bagua.topology.graphs import (
    Complete,
    ErdosRenyi,
    Exponential,
    Hypercube,
    Ring,
    Star,
    Torus,
    WeightedGraph,
    metropolis,
)
from bagua.topology.hosts import AlternatingExponentialRing, Hierarchical, over_ranks, ranks_by_node, weighted_by_size
from bagua.topology.matchings import AlternatingRing, Cycle, OnePeerExponential, RandomMatching, ShiftOne
from bagua.topology.names import available, create, register, resolve
from bagua.topology.rounds import Edge, Neighbours, Round, Turn, check_round
from bagua.topology.spectrum import consensus_rate, spectral_gap

__all__ = [
    "AlternatingExponentialRing",
    "AlternatingRing",
    "Complete",
    "Cycle",
    "Edge",
    "ErdosRenyi",
    "Exponential",
    "FunctionTopology",
    "Hierarchical",
    "Hypercube",
    "Neighbours",
    "OnePeerExponential",
    "RandomMatching",
    "Ring",
    "Round",
    "ShiftOne",
    "Star",
    "Topology",
    "Torus",
    "Turn",
    "WeightedGraph",
    "available",
    "check_round",
    "consensus_rate",
    "create",
    "metropolis",
    "over_ranks",
    "ranks_by_node",
    "register",
    "resolve",
    "spectral_gap",
    "weighted_by_size",
]
