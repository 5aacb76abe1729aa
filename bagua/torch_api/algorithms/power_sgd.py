"""``bagua.torch_api.algorithms.power_sgd``: gradients of low rank."""

from __future__ import annotations

from bagua.algorithms import PowerSGDAlgorithm, PowerSGDAlgorithmImpl

__all__ = ["PowerSGDAlgorithm", "PowerSGDAlgorithmImpl"]
