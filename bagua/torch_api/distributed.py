"""``bagua.torch_api.distributed``: the engine and its wrappers, under their documented names."""

from bagua.algorithms import DistributedAlgorithm
from bagua.parallel import (
    BaguaModule,
    BucketType,
    DistributedModule,
    ModelSwitchWrapper,
    OverlappingWrapper,
    Reducer,
    allreduce_parameters,
    bagua_init,
    broadcast_parameters,
)

__all__ = [
    "BaguaModule", "BucketType", "DistributedAlgorithm", "DistributedModule", "ModelSwitchWrapper",
    "OverlappingWrapper", "Reducer", "allreduce_parameters", "bagua_init", "broadcast_parameters",
]  # fmt: skip
