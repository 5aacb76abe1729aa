"""``bagua.torch_api.algorithms.gradient_allreduce``: synchronous training."""

from bagua.algorithms import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]
