"""``bagua.torch_api.algorithms.bytegrad``: one byte for each element of a gradient."""

from __future__ import annotations

from bagua.algorithms import ByteGradAlgorithm, ByteGradAlgorithmImpl

__all__ = ["ByteGradAlgorithm", "ByteGradAlgorithmImpl"]
