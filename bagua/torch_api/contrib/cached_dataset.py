"""``bagua.torch_api.contrib.cached_dataset``: samples that are slow to make are made once."""

from __future__ import annotations

from bagua.utilities.data import CachedDataset, CacheLoader

__all__ = ["CacheLoader", "CachedDataset"]
