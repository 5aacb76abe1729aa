"""``bagua.torch_api.algorithms.base``: what algorithms are made of."""

from bagua.algorithms import Algorithm, AlgorithmImpl
from bagua.algorithms import registry as GlobalAlgorithmRegistry  # noqa: N812 (documented name)

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry"]
