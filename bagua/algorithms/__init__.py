"""Algorithms that say what ranks exchange, and when; one file each."""

from bagua.algorithms.async_model_average import (
    AsyncModelAverageAlgorithm,
    AsyncModelAverageAlgorithmImpl,
    AveragingStatus,
)
from bagua.algorithms.base import Algorithm, AlgorithmImpl, Plane, around, as_algorithm, bound_form, registry
from bagua.algorithms.between_islands import BetweenIslands, LetIn, OverIslands
from bagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from bagua.algorithms.choco import ChocoAlgorithm, ChocoAlgorithmImpl
from bagua.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from bagua.algorithms.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl
from bagua.algorithms.exchange import (
    OF_BUCKETS as OF_BUCKETS,
)
from bagua.algorithms.exchange import (
    POINTS as POINTS,
)
from bagua.algorithms.exchange import (
    Every,
    Exchange,
    Flight,
    How,
    Then,
    What,
)
from bagua.algorithms.exchange import (
    Point as Point,
)
from bagua.algorithms.gossip import DifferenceMix, Mix
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.local_sgd import LocalSGDAlgorithm, LocalSGDAlgorithmImpl
from bagua.algorithms.local_updates import LocalUpdates
from bagua.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.algorithms.model import Model
from bagua.algorithms.one_bit_adam import OneBitAdamAlgorithm, OneBitAdamAlgorithmImpl
from bagua.algorithms.outer import EagerStep, Outer, OuterStep
from bagua.algorithms.parts import Matrices, Named, Not, Parts, Select
from bagua.algorithms.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from bagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl
from bagua.algorithms.reduced import ReducedGradients
from bagua.algorithms.registry import DistributedAlgorithm, Registry
from bagua.algorithms.scatter_gather import ScatterGatherAllReduceAlgorithm, ScatterGatherAllReduceAlgorithmImpl
from bagua.algorithms.sign_sgd import SignSGDAlgorithm, SignSGDAlgorithmImpl
from bagua.algorithms.slowmo import SlowMoAlgorithm, SlowMoAlgorithmImpl, SlowStep
from bagua.algorithms.sparse_loco import SparseLoCoAlgorithm, SparseLoCoAlgorithmImpl
from bagua.algorithms.top_k import TopKAlgorithm, TopKAlgorithmImpl
from bagua.algorithms.tuples import Promise as Promise
from bagua.algorithms.values import Add, Blend, Buffers, Difference, Gradients, Mean, Replace, Sum, Weights

__all__ = [
    "Add",
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
    "AveragingStatus",
    "BetweenIslands",
    "Blend",
    "Buffers",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "ChocoAlgorithm",
    "ChocoAlgorithmImpl",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "Difference",
    "DifferenceMix",
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
    "LocalSGDAlgorithm",
    "LocalSGDAlgorithmImpl",
    "LocalUpdates",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "Matrices",
    "Mean",
    "Mix",
    "Model",
    "Named",
    "Not",
    "OneBitAdamAlgorithm",
    "OneBitAdamAlgorithmImpl",
    "Outer",
    "OuterStep",
    "OverIslands",
    "Parts",
    "Plane",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "ReducedGradients",
    "Registry",
    "Replace",
    "ScatterGatherAllReduceAlgorithm",
    "ScatterGatherAllReduceAlgorithmImpl",
    "Select",
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

registry.register("gradient_allreduce", GradientAllReduceAlgorithm)
registry.register("scatter_gather_allreduce", ScatterGatherAllReduceAlgorithm)
registry.register("bytegrad", ByteGradAlgorithm)
registry.register("power_sgd", PowerSGDAlgorithm)
registry.register("top_k", TopKAlgorithm)
registry.register("sign_sgd", SignSGDAlgorithm)
registry.register("decentralized", DecentralizedAlgorithm)
registry.register("low_precision_decentralized", LowPrecisionDecentralizedAlgorithm)
registry.register("choco", ChocoAlgorithm)
registry.register("qadam", QAdamAlgorithm)
registry.register("one_bit_adam", OneBitAdamAlgorithm)
registry.register("local_sgd", LocalSGDAlgorithm)
registry.register("slowmo", SlowMoAlgorithm)
registry.register("diloco", DiLoCoAlgorithm)
registry.register("sparse_loco", SparseLoCoAlgorithm)
registry.register("async", AsyncModelAverageAlgorithm)
