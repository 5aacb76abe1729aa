"""Documented import path of data-parallel modules: one with the arguments of torch's, one that is decentralized."""

from __future__ import annotations

from bagua.parallel import DecentralizedDataParallel, DistributedDataParallel, LRSchedulerFunction, OptimizerFunction

__all__ = ["LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "DecentralizedDataParallel", "DistributedDataParallel"]

#: Names of types in the documentation.
OPTIM_FN_TYPE = OptimizerFunction
LR_SCHEDULER_FN_TYPE = LRSchedulerFunction
