"""The names of ``torch.distributed``, on the communicators of bagua: ``import bagua.distributed as dist``.

Arguments, their order, defaults, what is written in place and what is returned are those of torch 2.13.
Errors and deadlines are bagua's. Ranks are global ranks; ``group_src``, ``group_dst`` and ``group_peer``
are ranks in the group. A group is one of bagua, a communicator, a group of torch, or None for all ranks.
A call on ``GroupMember.NON_GROUP_MEMBER`` returns None at once, without torch's warning. What differs is
said in one line at each function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagua.comm import (
    Backend,
    DistStoreError,
    FileStore,
    HashStore,
    PrefixStore,
    ProcessGroup,
    QueueEmptyError,
    ReduceOp,
    Store,
    TCPStore,
    default_pg_timeout,
    get_default_backend_for_device,
    get_node_local_rank,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_initialized,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
)
from bagua.comm import TorchWork as Work
from bagua.comm import (
    make_premul_sum as _make_nccl_premul_sum,  # noqa: F401 - torch's name
)
from bagua.distributed.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scatter,
)
from bagua.distributed.groups import (
    GroupMember,
    destroy_process_group,
    get_backend,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    init_process_group,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    split_group,
)
from bagua.distributed.messages import (
    P2POp,
    batch_isend_irecv,
    irecv,
    isend,
    recv,
    recv_object_list,
    send,
    send_object_list,
)
from bagua.distributed.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    scatter_object_list,
)
from bagua.errors import (
    CommunicationError as DistBackendError,
)
from bagua.errors import (
    CommunicationError as DistError,
)
from bagua.errors import (
    PeerLostError as DistNetworkError,
)
from bagua.late import late

if TYPE_CHECKING:
    from bagua.comm import reduce_op

__all__ = [
    "Backend",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "GroupMember",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "split_group",
]

__getattr__ = late(__name__, {"reduce_op": "bagua.comm"})[0]
