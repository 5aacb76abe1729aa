"""``bagua.torch_api.algorithms.q_adam``: Adam with a compressed momentum."""

from bagua.algorithms import QAdamAlgorithm, QAdamAlgorithmImpl
from bagua.optim import QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]
