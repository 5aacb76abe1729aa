"""Algorithms that say what ranks exchange, and when; one file each."""

from bagua.algorithms.async_model_average import (
    AsyncModelAverageAlgorithm,
    AsyncModelAverageAlgorithmImpl,
    AveragingStatus,
)
from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucketing, Traits, as_algorithm, registry
from bagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from bagua.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.algorithms.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from bagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl
from bagua.algorithms.reduced import ReducedGradients, ReducedGradientsImpl
from bagua.algorithms.registry import DistributedAlgorithm, Registry
from bagua.algorithms.scatter_gather import ScatterGatherAllReduceAlgorithm, ScatterGatherAllReduceAlgorithmImpl
from bagua.algorithms.sign_sgd import SignSGDAlgorithm, SignSGDAlgorithmImpl
from bagua.algorithms.top_k import TopKAlgorithm, TopKAlgorithmImpl

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
    "AveragingStatus",
    "Bucketing",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DistributedAlgorithm",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "ReducedGradients",
    "ReducedGradientsImpl",
    "Registry",
    "ScatterGatherAllReduceAlgorithm",
    "ScatterGatherAllReduceAlgorithmImpl",
    "SignSGDAlgorithm",
    "SignSGDAlgorithmImpl",
    "TopKAlgorithm",
    "TopKAlgorithmImpl",
    "Traits",
    "as_algorithm",
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
registry.register("qadam", QAdamAlgorithm)
registry.register("async", AsyncModelAverageAlgorithm)
