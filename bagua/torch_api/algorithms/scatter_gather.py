"""``bagua.torch_api.algorithms.scatter_gather``: each rank adds up one slice."""

from __future__ import annotations

from bagua.algorithms import ScatterGatherAllReduceAlgorithm, ScatterGatherAllReduceAlgorithmImpl

__all__ = ["ScatterGatherAllReduceAlgorithm", "ScatterGatherAllReduceAlgorithmImpl"]
