"""``DecentralizedDataParallel``: every bucket steps by itself and mixes its weights with those of a few other ranks."""

from bagua.engine import GlobalAverage
from bagua.parallel.decentralized.stepping import LRSchedulerFunction, OptimizerFunction
from bagua.parallel.decentralized.wrapper import DecentralizedDataParallel

__all__ = ["DecentralizedDataParallel", "GlobalAverage", "LRSchedulerFunction", "OptimizerFunction"]
