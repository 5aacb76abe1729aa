"""``bagua.torch_api.algorithms.decentralized``: training by gossip, in full and in low precision."""

from bagua.algorithms import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)

__all__ = ["DecentralizedAlgorithm", "DecentralizedAlgorithmImpl"]
__all__ += ["LowPrecisionDecentralizedAlgorithm", "LowPrecisionDecentralizedAlgorithmImpl"]
