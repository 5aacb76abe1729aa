"""``bagua.torch_api.algorithms.sparse_loco``: training alone for many steps, and few elements sent then."""

from __future__ import annotations

from bagua.algorithms import SparseLoCoAlgorithm, SparseLoCoAlgorithmImpl

__all__ = ["SparseLoCoAlgorithm", "SparseLoCoAlgorithmImpl"]
