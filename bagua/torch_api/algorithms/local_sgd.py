"""``bagua.torch_api.algorithms.local_sgd``: training alone for many steps."""

from __future__ import annotations

from bagua.algorithms import LocalSGDAlgorithm, LocalSGDAlgorithmImpl

__all__ = ["LocalSGDAlgorithm", "LocalSGDAlgorithmImpl"]
