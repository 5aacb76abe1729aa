"""The engine: hooks into autograd and optimizers, bucket scheduling, wrappers, switching."""

from bagua.parallel.hooks import BackwardHooks
from bagua.parallel.overlapping import DistributedModule, OverlappingWrapper
from bagua.parallel.reducer import DEFAULT_BUCKET_BYTES, BucketType, Reducer
from bagua.parallel.state import (
    allreduce_optimizer_state,
    allreduce_parameters,
    broadcast_buffers_of,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BackwardHooks",
    "BucketType",
    "DistributedModule",
    "OverlappingWrapper",
    "Reducer",
    "allreduce_optimizer_state",
    "allreduce_parameters",
    "broadcast_buffers_of",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
