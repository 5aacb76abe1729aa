"""``bagua.torch_api.algorithms.async_model_average``: every rank at its own pace."""

from bagua.algorithms import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl

__all__ = ["AsyncModelAverageAlgorithm", "AsyncModelAverageAlgorithmImpl"]
