"""``bagua.torch_api.algorithms.choco``: gossip in few bits."""

from __future__ import annotations

from bagua.algorithms import ChocoAlgorithm, ChocoAlgorithmImpl

__all__ = ["ChocoAlgorithm", "ChocoAlgorithmImpl"]
