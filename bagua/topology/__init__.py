"""Who mixes with whom: topologies as pure functions of the number of ranks and of the round."""

from typing import TYPE_CHECKING

from bagua.late import late
from bagua.topology.nodes import ranks_by_node

if TYPE_CHECKING:
    from bagua.topology.graphs import *
    from bagua.topology.hosts import *
    from bagua.topology.names import *
    from bagua.topology.topology import *

#: What is there once something mixes with neighbours.
_LATE = {
    "graphs": ("AlternatingRing", "Complete", "OnePeerExponential", "Ring", "ShiftOne", "Torus"),
    "hosts": ("AlternatingExponentialRing", "Hierarchical", "weighted_by_size"),
    "names": ("available", "create"),
    "topology": ("Edge", "Neighbours", "Round", "Topology", "Turn", "check_round", "consensus_rate"),
}
_places = {name: f"{__name__}.{place}" for place, names in _LATE.items() for name in names}
__all__ = ["ranks_by_node"]
__all__ += list(_places)
__getattr__, __dir__ = late(__name__, _places)
