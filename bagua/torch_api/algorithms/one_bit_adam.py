"""``bagua.torch_api.algorithms.one_bit_adam``: Adam that sends one bit for each element."""

from __future__ import annotations

from bagua.algorithms import OneBitAdamAlgorithm, OneBitAdamAlgorithmImpl

__all__ = ["OneBitAdamAlgorithm", "OneBitAdamAlgorithmImpl"]
