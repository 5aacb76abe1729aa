"""The communicator layer: groups, collectives, work handles, transports.

Knows nothing of modules, gradients or optimizers. It is the only room of the
project that communicates through ``torch.distributed``.
"""

from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.functional import (
    allgather,
    allgather_object,
    allreduce,
    allreduce_coalesced,
    alltoall,
    alltoall_v,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    gather,
    gather_object,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    scatter_object,
    send,
    sendrecv,
)
from bagua.comm.group import ProcessGroup, solo_group
from bagua.comm.non_member import NON_MEMBER, NonMember
from bagua.comm.reduction import ReduceOp
from bagua.comm.startup.adoption import Group
from bagua.comm.startup.default_group import (
    destroy_process_group,
    from_torch_group,
    get_default_group,
    get_local_rank,
    get_local_size,
    get_node_rank,
    get_rank,
    get_world_size,
    is_initialized,
    new_group,
    stats,
)
from bagua.comm.startup.initialization import init_process_group
from bagua.comm.statistics import KindStatistics
from bagua.comm.torch_backend.group import TorchBackendOptions, create_torch_group
from bagua.comm.transports.base import DONE, Handle, Membership, Transport
from bagua.comm.transports.lowering import LoweredTransport
from bagua.comm.transports.registry import register_transport
from bagua.comm.work import Work

__all__ = [
    "DONE",
    "NON_MEMBER",
    "Call",
    "Communicator",
    "Group",
    "Handle",
    "KindStatistics",
    "LoweredTransport",
    "Membership",
    "NonMember",
    "ProcessGroup",
    "ReduceOp",
    "TorchBackendOptions",
    "Transport",
    "Work",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_v",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "create_torch_group",
    "destroy_process_group",
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
    "reduce_scatter",
    "register_transport",
    "scatter",
    "scatter_object",
    "send",
    "sendrecv",
    "solo_group",
    "stats",
]
