"""``bagua.torch_api.algorithms.bytegrad``: one byte for each element of a gradient."""

from bagua.algorithms import ByteGradAlgorithm, ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
