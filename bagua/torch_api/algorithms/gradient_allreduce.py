"""``bagua.torch_api.algorithms.gradient_allreduce``: synchronous training."""

from __future__ import annotations

from bagua.algorithms import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl

__all__ = ["GradientAllReduceAlgorithm", "GradientAllReduceAlgorithmImpl"]
