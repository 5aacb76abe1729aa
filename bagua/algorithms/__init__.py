"""Algorithms that say what ranks exchange, and when; one file each."""

from typing import TYPE_CHECKING

from bagua.algorithms.base import Algorithm, AlgorithmImpl, ByHost, around, as_algorithm, bound_form, registry
from bagua.algorithms.base import WithInner as WithInner
from bagua.algorithms.declarations import DistributedAlgorithm, Registry
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import OF_BUCKETS as OF_BUCKETS
from bagua.algorithms.exchanges.fields import POINTS as POINTS
from bagua.algorithms.exchanges.fields import Every, How, Then, What
from bagua.algorithms.exchanges.fields import Point as Point
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.outer import EagerStep, Outer, OuterStep
from bagua.algorithms.exchanges.parts import Parts
from bagua.algorithms.exchanges.tuples import Promise as Promise
from bagua.algorithms.exchanges.tuples import differ_between_ranks as differ_between_ranks
from bagua.algorithms.exchanges.values import Add, Blend, Buffers, Difference, Gradients, Mean, Replace, Sum, Weights
from bagua.algorithms.gradients.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.gradients.reduced import ReducedGradients
from bagua.algorithms.local.between_islands import BetweenIslands, LetIn, OverIslands
from bagua.algorithms.local.local_updates import LocalUpdates
from bagua.late import late

if TYPE_CHECKING:
    from bagua.algorithms.async_model_average import (
        AsyncModelAverageAlgorithm,
        AsyncModelAverageAlgorithmImpl,
    )
    from bagua.algorithms.exchanges.gossip import DifferenceMix, Mix
    from bagua.algorithms.gradients.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
    from bagua.algorithms.gradients.dion import DionAlgorithm, DionAlgorithmImpl
    from bagua.algorithms.gradients.loco import LoCoAlgorithm, LoCoAlgorithmImpl
    from bagua.algorithms.gradients.one_bit_adam import OneBitAdamAlgorithm, OneBitAdamAlgorithmImpl
    from bagua.algorithms.gradients.one_bit_lamb import OneBitLambAlgorithm, OneBitLambAlgorithmImpl
    from bagua.algorithms.gradients.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
    from bagua.algorithms.gradients.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl
    from bagua.algorithms.gradients.scatter_gather import (
        ScatterGatherAllReduceAlgorithm,
        ScatterGatherAllReduceAlgorithmImpl,
    )
    from bagua.algorithms.gradients.sign_sgd import SignSGDAlgorithm, SignSGDAlgorithmImpl
    from bagua.algorithms.gradients.top_k import TopKAlgorithm, TopKAlgorithmImpl
    from bagua.algorithms.local.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl
    from bagua.algorithms.local.local_sgd import LocalSGDAlgorithm, LocalSGDAlgorithmImpl
    from bagua.algorithms.local.slowmo import SlowMoAlgorithm, SlowMoAlgorithmImpl, SlowStep
    from bagua.algorithms.local.sparse_loco import SparseLoCoAlgorithm, SparseLoCoAlgorithmImpl
    from bagua.algorithms.neighbors.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
    from bagua.algorithms.neighbors.low_precision_decentralized import (
        LowPrecisionDecentralizedAlgorithm,
        LowPrecisionDecentralizedAlgorithmImpl,
    )

__all__ = [
    "Add",
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
    "BetweenIslands",
    "Blend",
    "Buffers",
    "ByHost",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "Difference",
    "DifferenceMix",
    "DionAlgorithm",
    "DionAlgorithmImpl",
    "DistributedAlgorithm",
    "EagerStep",
    "Every",
    "Exchange",
    "Flight",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "Gradients",
    "How",
    "LetIn",
    "LoCoAlgorithm",
    "LoCoAlgorithmImpl",
    "LocalSGDAlgorithm",
    "LocalSGDAlgorithmImpl",
    "LocalUpdates",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "Mean",
    "Mix",
    "Model",
    "OneBitAdamAlgorithm",
    "OneBitAdamAlgorithmImpl",
    "OneBitLambAlgorithm",
    "OneBitLambAlgorithmImpl",
    "Outer",
    "OuterStep",
    "OverIslands",
    "Parts",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "ReducedGradients",
    "Registry",
    "Replace",
    "ScatterGatherAllReduceAlgorithm",
    "ScatterGatherAllReduceAlgorithmImpl",
    "SignSGDAlgorithm",
    "SignSGDAlgorithmImpl",
    "SlowMoAlgorithm",
    "SlowMoAlgorithmImpl",
    "SlowStep",
    "SparseLoCoAlgorithm",
    "SparseLoCoAlgorithmImpl",
    "Sum",
    "Then",
    "TopKAlgorithm",
    "TopKAlgorithmImpl",
    "Weights",
    "What",
    "around",
    "as_algorithm",
    "bound_form",
    "registry",
]

#: One line for each algorithm: its name, its module, and what its names begin with; then what else is there. A program
#: imports those that it asks for.
_ALGORITHMS = {
    "gradient_allreduce": ("gradients.gradient_allreduce", "GradientAllReduce"),
    "scatter_gather_allreduce": ("gradients.scatter_gather", "ScatterGatherAllReduce"),
    "bytegrad": ("gradients.bytegrad", "ByteGrad"),
    "power_sgd": ("gradients.power_sgd", "PowerSGD"),
    "top_k": ("gradients.top_k", "TopK"),
    "sign_sgd": ("gradients.sign_sgd", "SignSGD"),
    "decentralized": ("neighbors.decentralized", "Decentralized"),
    "low_precision_decentralized": ("neighbors.low_precision_decentralized", "LowPrecisionDecentralized"),
    "qadam": ("gradients.q_adam", "QAdam"),
    "one_bit_adam": ("gradients.one_bit_adam", "OneBitAdam"),
    "loco": ("gradients.loco", "LoCo"),
    "dion": ("gradients.dion", "Dion"),
    "one_bit_lamb": ("gradients.one_bit_lamb", "OneBitLamb"),
    "local_sgd": ("local.local_sgd", "LocalSGD"),
    "slowmo": ("local.slowmo", "SlowMo", "SlowStep"),
    "diloco": ("local.diloco", "DiLoCo"),
    "sparse_loco": ("local.sparse_loco", "SparseLoCo"),
    "async": ("async_model_average", "AsyncModelAverage"),
}
_places = dict.fromkeys(("DifferenceMix", "Mix"), f"{__name__}.exchanges.gossip")
for _name, (_place, _stem, *_others) in _ALGORITHMS.items():
    registry.register(_name, f"{__name__}.{_place}:{_stem}Algorithm")
    _places |= dict.fromkeys((f"{_stem}Algorithm", f"{_stem}AlgorithmImpl", *_others), f"{__name__}.{_place}")
__getattr__, __dir__ = late(__name__, _places)
