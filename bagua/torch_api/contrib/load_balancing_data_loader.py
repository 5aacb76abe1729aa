"""``bagua.torch_api.contrib.load_balancing_data_loader``: equal work for all ranks."""

from __future__ import annotations

from bagua.utilities.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
