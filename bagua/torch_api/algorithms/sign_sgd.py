"""``bagua.torch_api.algorithms.sign_sgd``: one bit for each element of a gradient."""

from __future__ import annotations

from bagua.algorithms import SignSGDAlgorithm, SignSGDAlgorithmImpl

__all__ = ["SignSGDAlgorithm", "SignSGDAlgorithmImpl"]
