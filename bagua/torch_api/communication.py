"""``bagua.torch_api.communication``: initialization, groups and collectives, under their documented names.

Everything is explained where it lives, in ``bagua.comm``.
"""

# ruff: noqa: F401 - what is imported here is what users find
# mypy: implicit-reexport

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

BaguaProcessGroup = ProcessGroup
BaguaSingleCommunicatorPy = Communicator

__all__ = [name for name in dir() if not name.startswith("_")]

#: Names of types in the documentation, which are here only.
TYPES = ("BaguaProcessGroup", "BaguaSingleCommunicatorPy")
