"""``bagua.torch_api.communication``: initialization, groups and collectives, under their documented names.

Everything is explained where it lives, in ``bagua.comm``.
"""

from bagua.comm import (
    NON_MEMBER,
    Communicator,
    ProcessGroup,
    ReduceOp,
    Work,
    allgather_object,
    allreduce,
    allreduce_coalesced,
    barrier,
    broadcast,
    broadcast_coalesced,
    broadcast_object,
    destroy_process_group,
    from_torch_group,
    gather_object,
    get_default_group,
    init_process_group,
    is_initialized,
    new_group,
    recv,
    reduce,
    scatter_object,
    send,
    sendrecv,
    stats,
)

__all__ = [
    "NON_MEMBER", "BaguaProcessGroup", "BaguaSingleCommunicatorPy", "Communicator", "ProcessGroup", "ReduceOp", "Work",
    "allgather_object", "allreduce", "allreduce_coalesced", "barrier", "broadcast", "broadcast_coalesced",
    "broadcast_object", "destroy_process_group", "from_torch_group", "gather_object", "get_default_group",
    "init_process_group", "is_initialized", "new_group", "recv", "reduce", "scatter_object", "send", "sendrecv",
    "stats",
]  # fmt: skip

#: Names of types in the documentation, which are here only.
TYPES = ("BaguaProcessGroup", "BaguaSingleCommunicatorPy")
BaguaProcessGroup = ProcessGroup
BaguaSingleCommunicatorPy = Communicator
