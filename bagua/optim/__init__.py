"""Optimizers, and functions that make them for buckets. No communication."""

from bagua.optim import companions
from bagua.optim.companions import *
from bagua.optim.dion import DionOptimizer
from bagua.optim.qadam import OneBitLambOptimizer, QAdamOptimizer

__all__ = ["DionOptimizer", "OneBitLambOptimizer", "QAdamOptimizer"]
__all__ += companions.__all__
