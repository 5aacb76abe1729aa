"""Optimizers, and functions that make them for buckets. No communication."""

from bagua.optim.companions import (
    AccumAdam,
    AccumAdamW,
    lr_scheduler_fn_cosine_with_warmup,
    optim_fn_accum_adam,
    optim_fn_accum_adamw,
    optim_fn_adam,
    optim_fn_adamw,
)
from bagua.optim.dion import DionOptimizer
from bagua.optim.qadam import OneBitLambOptimizer, QAdamOptimizer

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "DionOptimizer",
    "OneBitLambOptimizer",
    "QAdamOptimizer",
    "lr_scheduler_fn_cosine_with_warmup",
    "optim_fn_accum_adam",
    "optim_fn_accum_adamw",
    "optim_fn_adam",
    "optim_fn_adamw",
]
