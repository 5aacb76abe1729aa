"""The ways to wrap a model: in place, in a wrapper, as torch's DDP does; and names of the engine that users need."""

from typing import TYPE_CHECKING

# isort: off
from bagua.engine import DEFAULT_BUCKET_BYTES, BackwardHooks, BucketType, Reducer, TensorDeclaration
from bagua.engine import allreduce_optimizer_state, allreduce_parameters, broadcast_buffers_of
from bagua.engine import broadcast_optimizer_state, broadcast_parameters

# isort: on
from bagua.late import late
from bagua.parallel import data_parallel, module, wrappers
from bagua.parallel.data_parallel import *
from bagua.parallel.module import *
from bagua.parallel.module import come_in as come_in
from bagua.parallel.wrappers import *

if TYPE_CHECKING:
    from bagua.parallel.decentralized import *

__all__ = [
    "DEFAULT_BUCKET_BYTES", "BackwardHooks", "BucketType", "Reducer", "TensorDeclaration", "allreduce_optimizer_state",
    "allreduce_parameters", "broadcast_buffers_of", "broadcast_optimizer_state", "broadcast_parameters",
]  # fmt: skip
__all__ += data_parallel.__all__ + module.__all__ + wrappers.__all__

_DECENTRALIZED = ("DecentralizedDataParallel", "LRSchedulerFunction", "OptimizerFunction")
__getattr__, __dir__ = late(__name__, dict.fromkeys(_DECENTRALIZED, f"{__name__}.decentralized"))
