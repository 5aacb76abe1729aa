"""``bagua.torch_api.data_parallel``: one class with the arguments of torch's ``DistributedDataParallel``, one without."""

from __future__ import annotations

from bagua.parallel import DistributedDataParallel
from bagua.parallel.decentralized import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel", "DistributedDataParallel"]
