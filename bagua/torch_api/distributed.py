"""``bagua.torch_api.distributed``: the engine and its wrappers, under their documented names."""

# ruff: noqa: F401 - what is imported here is what users find
# mypy: implicit-reexport

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

__all__ = [name for name in dir() if not name.startswith("_")]
