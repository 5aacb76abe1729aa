"""Who mixes with whom: topologies as pure functions of the number of ranks and of the round."""

from typing import TYPE_CHECKING

from bagua.late import late
from bagua.topology.nodes import ranks_by_node

if TYPE_CHECKING:
    from bagua.topology.graphs import Complete, Ring, Torus
    from bagua.topology.hosts import AlternatingExponentialRing, Hierarchical, weighted_by_size
    from bagua.topology.matchings import AlternatingRing, OnePeerExponential, ShiftOne
    from bagua.topology.names import available, create, register
    from bagua.topology.rounds import Edge, Neighbours, Round, Turn, check_round
    from bagua.topology.topology import Topology, consensus_rate

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

#: What is there once something mixes with neighbours.
_LATE = {
    "topology": ("Topology", "consensus_rate"),
    "graphs": ("Complete", "Ring", "Torus"),
    "hosts": ("AlternatingExponentialRing", "Hierarchical", "weighted_by_size"),
    "matchings": ("AlternatingRing", "OnePeerExponential", "ShiftOne"),
    "names": ("available", "create", "register"),
    "rounds": ("Edge", "Neighbours", "Round", "Turn", "check_round"),
}
__getattr__, __dir__ = late(__name__, {name: f"{__name__}.{place}" for place, names in _LATE.items() for name in names})
