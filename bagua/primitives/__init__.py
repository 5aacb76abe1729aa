"""Operations that algorithms are made of: communicators composed with host layouts, codecs and topologies."""

from bagua.primitives.centralized import allreduce_sum, reducer_sum, scatter_gather_sum
from bagua.primitives.codec_reducers import AllGatherReducer, ContributorsReducer, ScatterGatherReducer
from bagua.primitives.decentralized import (
    DifferenceExchange,
    hierarchical_neighbour_average,
    is_global_mean,
    neighbour_average,
)
from bagua.primitives.dion import DionReducer
from bagua.primitives.feedback import EF21, AveragedFeedback, MomentumCorrection
from bagua.primitives.hierarchical import has_two_levels as has_two_levels
from bagua.primitives.hierarchical import hierarchical_sum, on_leaders
from bagua.primitives.hierarchical import through_leaders as through_leaders
from bagua.primitives.memory import MatrixBlock, ReducerMemory, State
from bagua.primitives.power_sgd import PowerSGDReducer
from bagua.primitives.power_sgd import orthonormal as orthonormal
from bagua.primitives.reducers import ErrorFeedback, SumReducer
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
