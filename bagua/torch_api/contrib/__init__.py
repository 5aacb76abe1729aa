"""``bagua.torch_api.contrib``: samplers and caches for training data, under the names of Bagua 0.9."""

from __future__ import annotations

from bagua.torch_api.contrib.cached_dataset import CachedDataset, CacheLoader
from bagua.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
]
