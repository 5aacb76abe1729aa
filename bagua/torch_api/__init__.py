"""What users import: ``import bagua.torch_api as bagua; bagua.init_process_group()``.

Names and places are those of Bagua's documentation. Nothing is implemented here. The
import puts ``with_bagua`` on ``torch.nn.Module``, makes the backend name ``bagua`` known
to ``torch.distributed``, and has no other side effect.
"""

from __future__ import annotations

from bagua.algorithms import DistributedAlgorithm
from bagua.comm.torch_backend.group import TorchBackendOptions, install_torch_backend
from bagua.parallel import AutotuneSettings, BaguaModule, bagua_init, install_with_bagua
from bagua.torch_api import (
    algorithms,
    communication,
    data_parallel,
    distributed,
    distributed_define,
    env,
    exceptions,
)
from bagua.torch_api.communication import (
    NON_MEMBER,
    Communicator,
    ProcessGroup,
    ReduceOp,
    Work,
    allgather,
    allgather_inplace,
    allgather_object,
    allreduce,
    allreduce_coalesced,
    allreduce_coalesced_inplace,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    destroy_process_group,
    from_torch_group,
    gather,
    gather_object,
    get_default_group,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    scatter,
    scatter_object,
    send,
    sendrecv,
    stats,
)
from bagua.torch_api.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size

__all__ = [
    "NON_MEMBER",
    "AutotuneSettings",
    "BaguaModule",
    "Communicator",
    "DistributedAlgorithm",
    "ProcessGroup",
    "ReduceOp",
    "TorchBackendOptions",
    "Work",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allgather_object",
    "allreduce",
    "allreduce_coalesced",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "bagua_init",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "communication",
    "data_parallel",
    "destroy_process_group",
    "distributed",
    "distributed_define",
    "env",
    "exceptions",
    "from_torch_group",
    "gather",
    "gather_object",
    "get_default_group",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "scatter",
    "scatter_object",
    "send",
    "sendrecv",
    "stats",
]

install_with_bagua()
install_torch_backend()
