"""Who mixes with whom: topologies as pure functions of the number of ranks and of the round."""

from typing import TYPE_CHECKING

from bagua.late import late
from bagua.topology.nodes import ranks_by_node

if TYPE_CHECKING:
    from bagua.topology.graphs import *
    from bagua.topology.topology import *

#: What is there once something mixes with neighbours.
_LATE = {
    "graphs": (
        *("AlternatingExponentialRing", "AlternatingRing", "Complete", "Hierarchical", "OnePeerExponential", "Ring"),
        *("ShiftOne", "Torus", "available", "create", "weighted_by_size"),
    ),
    "topology": ("Edge", "Neighbours", "Round", "Topology", "Turn", "check_round", "consensus_rate"),
}
_places = {name: f"{__name__}.{place}" for place, names in _LATE.items() for name in names}
__all__ = ["ranks_by_node"]
__all__ += list(_places)
__getattr__, __dir__ = late(__name__, _places)
