"""``bagua.torch_api.communication``: initialization, groups and collectives, under their documented names.

Everything is explained where it lives, in ``bagua.comm``. The names that end in
``_inplace`` are those of Bagua 0.9; the functions work in place anyway.
"""

from __future__ import annotations

from bagua.comm import (
    NON_MEMBER,
    Communicator,
    ProcessGroup,
    ReduceOp,
    Work,
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
    reduce_scatter,
    scatter,
    scatter_object,
    send,
    sendrecv,
    stats,
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
    "allgather_object",
    "allreduce",
    "allreduce_coalesced",
    "allreduce_coalesced_inplace",
    "allreduce_inplace",
    "alltoall",
    "alltoall_v",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_object",
    "get_default_group",
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

#: Names of types in the documentation.
BaguaProcessGroup = ProcessGroup
BaguaSingleCommunicatorPy = Communicator

allreduce_inplace = allreduce
allreduce_coalesced_inplace = allreduce_coalesced
reduce_inplace = reduce
