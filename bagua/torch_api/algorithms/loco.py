"""``bagua.torch_api.algorithms.loco``: gradients in four bits."""

from __future__ import annotations

from bagua.algorithms import LoCoAlgorithm, LoCoAlgorithmImpl

__all__ = ["LoCoAlgorithm", "LoCoAlgorithmImpl"]
