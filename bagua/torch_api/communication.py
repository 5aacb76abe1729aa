"""``bagua.torch_api.communication``: initialization, groups and collectives, under their documented names.

Everything is explained where it lives, in ``bagua.comm``. Here the tensor that is sent comes before the one
that receives, as in Bagua 0.9, and a second tensor selects 0.9's form of ``allreduce`` and ``reduce``.
"""

from __future__ import annotations

from bagua.comm import (
    NON_MEMBER,
    Communicator,
    ProcessGroup,
    ReduceOp,
    Work,
    allgather_object,
    allreduce_coalesced,
    barrier,
    broadcast_object,
    destroy_process_group,
    from_torch_group,
    gather_object,
    get_default_group,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    scatter_object,
    send,
    sendrecv,
    stats,
)
from bagua.torch_api.collectives import (
    allgather,
    allgather_inplace,
    allreduce,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    broadcast,
    broadcast_coalesced,
    gather,
    gather_inplace,
    get_backend,
    reduce,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
)

__all__ = [
    "NON_MEMBER",
    "BaguaProcessGroup",
    "BaguaSingleCommunicatorPy",
    "Communicator",
    "ProcessGroup",
    "ReduceOp",
    "Work",
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
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "gather_object",
    "get_backend",
    "get_default_group",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "scatter_object",
    "send",
    "sendrecv",
    "stats",
]

#: Names of types in the documentation.
BaguaProcessGroup = ProcessGroup
BaguaSingleCommunicatorPy = Communicator

allreduce_inplace = allreduce
allreduce_coalesced_inplace = allreduce_coalesced
reduce_inplace = reduce
