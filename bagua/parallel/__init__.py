"""The engine: hooks into autograd and optimizers, bucket scheduling, wrappers, switching."""

from typing import TYPE_CHECKING

from bagua.engine import (
    DEFAULT_BUCKET_BYTES,
    BackwardHooks,
    BucketType,
    Reducer,
    TensorDeclaration,
    allreduce_optimizer_state,
    allreduce_parameters,
    broadcast_buffers_of,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from bagua.late import late
from bagua.parallel.data_parallel import DistributedDataParallel
from bagua.parallel.module import BaguaModule, install_with_bagua, unwrap, with_bagua
from bagua.parallel.module import come_in as come_in
from bagua.parallel.wrappers import DistributedModule, ModelSwitchWrapper, OverlappingWrapper, bagua_init

if TYPE_CHECKING:
    from bagua.parallel.decentralized import *

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "BackwardHooks",
    "BaguaModule",
    "BucketType",
    "DistributedDataParallel",
    "DistributedModule",
    "ModelSwitchWrapper",
    "OverlappingWrapper",
    "Reducer",
    "TensorDeclaration",
    "allreduce_optimizer_state",
    "allreduce_parameters",
    "bagua_init",
    "broadcast_buffers_of",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "install_with_bagua",
    "unwrap",
    "with_bagua",
]

_DECENTRALIZED = ("DecentralizedDataParallel", "LRSchedulerFunction", "OptimizerFunction")
__getattr__, __dir__ = late(__name__, dict.fromkeys(_DECENTRALIZED, f"{__name__}.decentralized"))
