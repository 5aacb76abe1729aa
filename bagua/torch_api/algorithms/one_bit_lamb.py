"""``bagua.torch_api.algorithms.one_bit_lamb``: LAMB that sends one bit for each element."""

from __future__ import annotations

from bagua.algorithms import OneBitLambAlgorithm, OneBitLambAlgorithmImpl

__all__ = ["OneBitLambAlgorithm", "OneBitLambAlgorithmImpl"]
