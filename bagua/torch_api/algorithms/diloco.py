"""``bagua.torch_api.algorithms.diloco``: training alone for many steps."""

from __future__ import annotations

from bagua.algorithms import DiLoCoAlgorithm, DiLoCoAlgorithmImpl, Outer

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl", "Outer"]
