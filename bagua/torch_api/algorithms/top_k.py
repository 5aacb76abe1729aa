"""``bagua.torch_api.algorithms.top_k``: the largest elements of a gradient."""

from __future__ import annotations

from bagua.algorithms.top_k import TopKAlgorithm, TopKAlgorithmImpl

__all__ = ["TopKAlgorithm", "TopKAlgorithmImpl"]
