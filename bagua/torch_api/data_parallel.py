"""``bagua.torch_api.data_parallel``: the class with the arguments of torch's ``DistributedDataParallel``."""

from __future__ import annotations

from bagua.parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
