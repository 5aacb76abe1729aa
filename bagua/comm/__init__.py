"""The communicator layer: groups, collectives, work handles, transports.

Knows nothing of modules, gradients or optimizers. It is the only room of the
project that communicates through ``torch.distributed``.

``__all__`` is for users. What stands between the two marks is for other packages of bagua, which come in by this door.
"""

# mypy: implicit-reexport

from typing import TYPE_CHECKING

from bagua.comm import functional
from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.functional import *
from bagua.comm.group import NON_MEMBER, NonMember, ProcessGroup, solo_group
from bagua.comm.records.recorder import KindStatistics
from bagua.comm.reduction import ReduceOp
from bagua.comm.startup import default_group
from bagua.comm.startup.adoption import Group
from bagua.comm.startup.default_group import *
from bagua.comm.startup.initialization import init_process_group
from bagua.comm.torch_backend.creation import create_torch_group
from bagua.comm.torch_backend.starter import ReconfigureOptions, TorchBackendOptions
from bagua.comm.transports.contract import DONE, Handle, Membership, Transport
from bagua.comm.transports.registry import register_transport
from bagua.comm.work import Work

# For other packages of bagua.
# isort: off
from torch.distributed import Backend, DistStoreError, FileStore, HashStore, PrefixStore, QueueEmptyError, Store
from torch.distributed import TCPStore, get_default_backend_for_device, get_node_local_rank, is_available
from torch.distributed import is_backend_available, is_gloo_available, is_mpi_available, is_nccl_available
from torch.distributed import is_torchelastic_launched, is_ucc_available, is_xccl_available
from torch.distributed.constants import default_pg_timeout
from bagua.comm.lifetime.background import BackgroundThread, Wake, close_with
from bagua.comm.lifetime.forks import family, forked_error, run_all
from bagua.comm.long_wait import LongWait
from bagua.comm.objects import as_bytes, decode, encoded_later
from bagua.comm.operands import as_seconds, check_rank
from bagua.comm.pieces.fetching import Fetch, PhaseDeadline, ask_now
from bagua.comm.pieces.server import PieceServer, PieceShelf, Source
from bagua.comm.records.recorder import LATE_SHARE, CallRecord, CallTimes, Place, Recorder, in_background, observers
from bagua.comm.reduction import copy_flat, divide
from bagua.comm.startup.adoption import *
from bagua.comm.startup.default_group import become_rank, uncaught_error
from bagua.comm.startup.initialization import DEFAULT_TIMEOUT_S
from bagua.comm.startup.formation import group_of_seats, rehearsal_group
from bagua.comm.store.asking import Beats, connect_beats, consult, gather_values
from bagua.comm.store.bucket import ObjectBucket, bucket_of, open_bucket
from bagua.comm.store.keys import Cells
from bagua.comm.store.serving import close_store, connect_store, meet_at, open_store, serve_store, serve_store_at
from bagua.comm.store.serving import thread_store
from bagua.comm.torch_backend.creation import create_requested_group, install_torch_backend
from bagua.comm.torch_backend.work import BackwardWatch, CallbackThread, TorchWork
from bagua.comm.torch_forms import allgather_tensors, alltoall_rows, alltoall_tensors, gather_tensors, is_scaled
from bagua.comm.torch_forms import mail_of, reduce_scatter_tensors, scale, scaled, scatter_tensors
from bagua.comm.torch_private import TorchCalls, make_premul_sum
from bagua.comm.transports.registry import backend_refusal, create_transport
from bagua.comm.transports.threads import FaultHook, RankKilled, inject_fault
from bagua.comm.work import followed
# isort: on

from bagua.late import late

if TYPE_CHECKING:
    from torch.distributed import reduce_op

__all__ = ["DONE", "NON_MEMBER", "Call", "Communicator", "Group", "Handle", "KindStatistics", "Membership"]
__all__ += ["NonMember", "ProcessGroup", "ReconfigureOptions", "ReduceOp", "TorchBackendOptions", "Transport", "Work"]
__all__ += ["create_torch_group", "init_process_group", "register_transport", "solo_group"]
__all__ += list(functional.FUNCTIONS)
__all__ += default_group.__all__

#: It warns whatever is asked of it, so it is not among what tools look through.
__getattr__ = late(__name__, {"reduce_op": "torch.distributed"})[0]
