"""Algorithms that say what ranks exchange, and when; one file each."""

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucketing, Traits, as_algorithm, registry
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.registry import DistributedAlgorithm, Registry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "Bucketing",
    "DistributedAlgorithm",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "Registry",
    "Traits",
    "as_algorithm",
    "registry",
]

registry.register("gradient_allreduce", GradientAllReduceAlgorithm)
