"""What users import: ``import bagua.torch_api as bagua; bagua.init_process_group()``.

Names and places are those of Bagua's documentation. Nothing is implemented here. The
import puts ``with_bagua`` on ``torch.nn.Module``, makes the backend name ``bagua`` known
to ``torch.distributed``, and has no other side effect.
"""

from typing import TYPE_CHECKING, Any

from bagua import distributed as _names_of_torch
from bagua.algorithms import DistributedAlgorithm
from bagua.checks import did_you_mean
from bagua.comm import TorchBackendOptions, install_torch_backend
from bagua.late import late
from bagua.membership import ElasticSampler, Islands, Members, join_islands
from bagua.observe import metrics
from bagua.parallel import BaguaModule, bagua_init, install_with_bagua, unwrap, with_bagua
from bagua.torch_api import algorithms, communication, data_parallel, distributed, distributed_define, env, exceptions
from bagua.torch_api.communication import *
from bagua.torch_api.env import *

if TYPE_CHECKING:
    from bagua.advise import advise, watch
    from bagua.utilities.training import distributed_loader, print_rank_0

__all__ = [
    "BaguaModule", "DistributedAlgorithm", "ElasticSampler", "Islands", "Members", "TorchBackendOptions", "advise",
    "algorithms", "bagua_init", "communication", "data_parallel", "distributed", "distributed_define",
    "distributed_loader", "env", "exceptions", "join_islands", "metrics", "print_rank_0", "unwrap", "watch",
    "with_bagua",
]  # fmt: skip
__all__ += env.__all__
__all__ += [name for name in communication.__all__ if name not in communication.TYPES]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return _late(name)
    if name in _OUTPUT_FIRST:
        advice = f"bagua.comm.{name} has it, and takes the tensor that receives first"
    else:
        advice = "" if name.startswith("_") else did_you_mean(_ELSEWHERE.get(name, name), __all__)
        if not advice and name in _names_of_torch.__all__:
            advice = f"bagua.distributed.{name} has it"
    raise AttributeError(f"module 'bagua.torch_api' has no attribute {name!r}" + (f". {advice}" if advice else ""))


#: What few programs ask for, and takes long to import.
_LATE = {
    **dict.fromkeys(("advise", "watch"), "bagua.advise"),
    **dict.fromkeys(("distributed_loader", "print_rank_0"), "bagua.utilities.training"),
}
_late, __dir__ = late(__name__, _LATE)

#: What others call the same.
_ELSEWHERE = {
    "init": "init_process_group",
    "rank": "get_rank",
    "size": "get_world_size",
    "local_rank": "get_local_rank",
}

#: Bagua 0.9 took the tensor that is sent first. An old call must not run with its tensors exchanged.
_OUTPUT_FIRST = ("allgather", "alltoall", "alltoall_v", "gather", "reduce_scatter", "scatter")

install_with_bagua()
install_torch_backend()
