"""``bagua.torch_api.algorithms.decentralized``: training by gossip, in full and in low precision."""

from __future__ import annotations

from bagua.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from bagua.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)

__all__ = [
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]
