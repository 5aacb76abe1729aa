"""``bagua.torch_api.algorithms.zero_one_adam``: Adam that sends one bit for each element, and not in every step."""

from __future__ import annotations

from bagua.algorithms import ZeroOneAdamAlgorithm, ZeroOneAdamAlgorithmImpl

__all__ = ["ZeroOneAdamAlgorithm", "ZeroOneAdamAlgorithmImpl"]
