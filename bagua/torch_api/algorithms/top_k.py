"""``bagua.torch_api.algorithms.top_k``: the largest elements of a gradient."""

from __future__ import annotations

from bagua.algorithms import TopKAlgorithm, TopKAlgorithmImpl

__all__ = ["TopKAlgorithm", "TopKAlgorithmImpl"]
