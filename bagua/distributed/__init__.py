"""The names of ``torch.distributed``, on the communicators of bagua: ``import bagua.distributed as dist``.

Arguments, their order, defaults, what is written in place and what is returned are those of torch 2.13.
Errors and deadlines are bagua's. Ranks are global ranks; ``group_src``, ``group_dst`` and ``group_peer``
are ranks in the group. A group is one of bagua, a communicator, a group of torch, or None for all ranks.
A call on ``GroupMember.NON_GROUP_MEMBER`` returns None at once, without torch's warning. What differs is
said in one line at each function.
"""

from typing import TYPE_CHECKING

# isort: off
from bagua.comm import Backend, DistStoreError, FileStore, HashStore, PrefixStore, ProcessGroup, QueueEmptyError
from bagua.comm import ReduceOp, Store, TCPStore, TorchWork, default_pg_timeout, get_default_backend_for_device
from bagua.comm import get_node_local_rank, is_available, is_backend_available, is_gloo_available, is_initialized
from bagua.comm import is_mpi_available, is_nccl_available, is_torchelastic_launched, is_ucc_available
from bagua.comm import is_xccl_available, make_premul_sum

# isort: on
from bagua.distributed import collectives, groups, point_to_point
from bagua.distributed.collectives import *
from bagua.distributed.groups import *
from bagua.distributed.point_to_point import *
from bagua.errors import CommunicationError, PeerLostError
from bagua.late import late

if TYPE_CHECKING:
    from bagua.comm import reduce_op

# Under the names of torch.
Work, _make_nccl_premul_sum = TorchWork, make_premul_sum
DistBackendError, DistError, DistNetworkError = CommunicationError, CommunicationError, PeerLostError

__all__ = ["Backend", "DistBackendError", "DistError", "DistNetworkError", "DistStoreError", "FileStore"]
__all__ += ["HashStore", "PrefixStore", "ProcessGroup", "QueueEmptyError", "ReduceOp", "Store", "TCPStore", "Work"]
__all__ += ["default_pg_timeout", "get_default_backend_for_device", "get_node_local_rank", "is_available"]
__all__ += ["is_backend_available", "is_gloo_available", "is_initialized", "is_mpi_available", "is_nccl_available"]
__all__ += ["is_torchelastic_launched", "is_ucc_available", "is_xccl_available", "reduce_op"]
__all__ += collectives.__all__ + groups.__all__ + point_to_point.__all__

__getattr__ = late(__name__, {"reduce_op": "bagua.comm"})[0]
