"""Operations that algorithms are made of: communicators composed with host layouts, codecs and topologies."""

from typing import TYPE_CHECKING

from bagua.late import late
from bagua.primitives import centralized, reducers
from bagua.primitives.centralized import *
from bagua.primitives.centralized import through_leaders as through_leaders
from bagua.primitives.digests import differ_by_rounding as differ_by_rounding
from bagua.primitives.digests import digest_of_gradients as digest_of_gradients
from bagua.primitives.digests import quick_digest as quick_digest
from bagua.primitives.reducers import *

if TYPE_CHECKING:
    from bagua.primitives.codec_reducers import *
    from bagua.primitives.feedback import *
    from bagua.primitives.low_rank import *
    from bagua.primitives.neighbors import *

__all__: list[str] = []
__all__ += centralized.__all__ + reducers.__all__

#: What exact exchanges do without.
_LATE = {
    "codec_reducers": ("AllGatherReducer", "ContributorsReducer", "ScatterGatherReducer", "SparseReducer"),
    "neighbors": ("DifferenceExchange", "hierarchical_neighbour_average", "is_global_mean", "neighbour_average"),
    "feedback": ("EF21", "AveragedFeedback", "MomentumCorrection"),
    "low_rank": ("DionReducer", "PowerSGDReducer"),
}
_places = {name: f"{__name__}.{place}" for place, names in _LATE.items() for name in names}
__all__ += list(_places)
__getattr__, __dir__ = late(__name__, {**_places, "orthonormal": f"{__name__}.low_rank"})
