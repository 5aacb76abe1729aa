"""Operations that algorithms are made of: communicators composed with host layouts, codecs and topologies."""

from typing import TYPE_CHECKING

from bagua.late import late
from bagua.primitives.centralized import allreduce_sum, reducer_sum, scatter_gather_sum
from bagua.primitives.digests import differ_by_rounding as differ_by_rounding
from bagua.primitives.digests import digest_of_gradients as digest_of_gradients
from bagua.primitives.digests import quick_digest as quick_digest
from bagua.primitives.hierarchical import has_two_levels as has_two_levels
from bagua.primitives.hierarchical import hierarchical_sum, on_leaders
from bagua.primitives.hierarchical import through_leaders as through_leaders
from bagua.primitives.memory import MatrixBlock, ReducerMemory, State
from bagua.primitives.reducers import ErrorFeedback, SumReducer

if TYPE_CHECKING:
    from bagua.primitives.codec_reducers import AllGatherReducer, ContributorsReducer, ScatterGatherReducer
    from bagua.primitives.decentralized import (
        DifferenceExchange,
        hierarchical_neighbour_average,
        is_global_mean,
        neighbour_average,
    )
    from bagua.primitives.dion import DionReducer
    from bagua.primitives.feedback import EF21, AveragedFeedback, MomentumCorrection
    from bagua.primitives.power_sgd import PowerSGDReducer
    from bagua.primitives.power_sgd import orthonormal as orthonormal
    from bagua.primitives.sparse import SparseReducer

__all__ = [
    "EF21",
    "AllGatherReducer",
    "AveragedFeedback",
    "ContributorsReducer",
    "DifferenceExchange",
    "DionReducer",
    "ErrorFeedback",
    "MatrixBlock",
    "MomentumCorrection",
    "PowerSGDReducer",
    "ReducerMemory",
    "ScatterGatherReducer",
    "SparseReducer",
    "State",
    "SumReducer",
    "allreduce_sum",
    "hierarchical_neighbour_average",
    "hierarchical_sum",
    "is_global_mean",
    "neighbour_average",
    "on_leaders",
    "reducer_sum",
    "scatter_gather_sum",
]

#: What exact exchanges do without.
_LATE = {
    "codec_reducers": ("AllGatherReducer", "ContributorsReducer", "ScatterGatherReducer"),
    "decentralized": ("DifferenceExchange", "hierarchical_neighbour_average", "is_global_mean", "neighbour_average"),
    "dion": ("DionReducer",),
    "feedback": ("EF21", "AveragedFeedback", "MomentumCorrection"),
    "power_sgd": ("PowerSGDReducer", "orthonormal"),
    "sparse": ("SparseReducer",),
}
__getattr__, __dir__ = late(__name__, {name: f"{__name__}.{place}" for place, names in _LATE.items() for name in names})
