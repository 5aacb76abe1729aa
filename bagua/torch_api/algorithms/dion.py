"""``bagua.torch_api.algorithms.dion``: orthonormal directions of low rank."""

from __future__ import annotations

from bagua.algorithms import DionAlgorithm, DionAlgorithmImpl

__all__ = ["DionAlgorithm", "DionAlgorithmImpl"]
