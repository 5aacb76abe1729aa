"""``bagua.torch_api.algorithms.diloco``: training alone for many steps."""

from __future__ import annotations

from bagua.algorithms import Outer
from bagua.algorithms.diloco import DiLoCoAlgorithm, DiLoCoAlgorithmImpl

__all__ = ["DiLoCoAlgorithm", "DiLoCoAlgorithmImpl", "Outer"]
