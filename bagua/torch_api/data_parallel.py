"""Documented import path of data-parallel modules: one with the arguments of torch's, one that is decentralized."""

from __future__ import annotations

from bagua.parallel import DistributedDataParallel
from bagua.parallel.decentralized import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel", "DistributedDataParallel"]
