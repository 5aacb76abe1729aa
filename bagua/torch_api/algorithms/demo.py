"""``bagua.torch_api.algorithms.demo``: steps by the sign of the largest cosine coefficients of momenta."""

from __future__ import annotations

from bagua.algorithms import DeMoAlgorithm, DeMoAlgorithmImpl

__all__ = ["DeMoAlgorithm", "DeMoAlgorithmImpl"]
