"""The communicator layer: groups, collectives, work handles, transports.

Knows nothing of modules, gradients or optimizers. It is the only room of the
project that communicates through ``torch.distributed``.

``__all__`` is for users. What is imported ``as`` itself is for other packages of bagua, which come in by this door.
"""

from typing import TYPE_CHECKING

from bagua.comm import functional
from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.functional import *
from bagua.comm.group import ProcessGroup, solo_group
from bagua.comm.non_member import NON_MEMBER, NonMember
from bagua.comm.records.statistics import KindStatistics
from bagua.comm.reduction import ReduceOp
from bagua.comm.startup import default_group
from bagua.comm.startup.adoption import Group
from bagua.comm.startup.default_group import *
from bagua.comm.startup.initialization import init_process_group
from bagua.comm.torch_backend.creation import create_torch_group
from bagua.comm.torch_backend.starter import TorchBackendOptions
from bagua.comm.transports.contract import DONE, Handle, Membership, Transport
from bagua.comm.transports.registry import register_transport
from bagua.comm.work import Work

# For other packages of bagua.
# isort: off
from torch.distributed import (
    Backend as Backend,
    DistStoreError as DistStoreError,
    FileStore as FileStore,
    HashStore as HashStore,
    PrefixStore as PrefixStore,
    QueueEmptyError as QueueEmptyError,
    Store as Store,
    TCPStore as TCPStore,
    get_default_backend_for_device as get_default_backend_for_device,
    get_node_local_rank as get_node_local_rank,
    is_available as is_available,
    is_backend_available as is_backend_available,
    is_gloo_available as is_gloo_available,
    is_mpi_available as is_mpi_available,
    is_nccl_available as is_nccl_available,
    is_torchelastic_launched as is_torchelastic_launched,
    is_ucc_available as is_ucc_available,
    is_xccl_available as is_xccl_available,
)
from torch.distributed.constants import default_pg_timeout as default_pg_timeout
from bagua.comm.lifetime.background import BackgroundThread as BackgroundThread
from bagua.comm.lifetime.closer import close_with as close_with
from bagua.comm.lifetime.closing import uncaught_error as uncaught_error
from bagua.comm.lifetime.forks import family as family, forked_error as forked_error
from bagua.comm.lifetime.closer import Wake as Wake
from bagua.comm.long_wait import LongWait as LongWait
from bagua.comm.objects import (
    as_bytes as as_bytes,
    decode as decode,
    encoded_later as encoded_later,
)
from bagua.comm.operands import as_seconds as as_seconds, check_rank as check_rank, check_tensor as check_tensor
from bagua.comm.pipeline import CallOptions as CallOptions
from bagua.comm.pieces.fetching import PhaseDeadline as PhaseDeadline
from bagua.comm.pieces.fetching import Fetch as Fetch, ask_now as ask_now
from bagua.comm.pieces.server import PieceServer as PieceServer, Source as Source
from bagua.comm.pieces.shelf import PieceShelf as PieceShelf
from bagua.comm.records.recorder import (
    LATE_SHARE as LATE_SHARE,
    CallRecord as CallRecord,
    CallTimes as CallTimes,
    Place as Place,
    Recorder as Recorder,
    in_background as in_background,
    observers as observers,
)
from bagua.comm.reduction import divide as divide, reduction_name as reduction_name
from bagua.comm.startup.adoption import *
from bagua.comm.startup.default_group import become_rank as become_rank
from bagua.comm.startup.initialization import DEFAULT_TIMEOUT_S as DEFAULT_TIMEOUT_S
from bagua.comm.startup.rehearsal import rehearsal_group as rehearsal_group
from bagua.comm.startup.seats import group_of_seats as group_of_seats
from bagua.comm.records.statistics import sent_bytes as sent_bytes
from bagua.comm.store.asking import consult as consult, gather_values as gather_values
from bagua.comm.store.bucket import (
    ObjectBucket as ObjectBucket,
    bucket_of as bucket_of,
    open_bucket as open_bucket,
)
from bagua.comm.store.beats import Beats as Beats, connect_beats as connect_beats
from bagua.comm.store.cells import Cells as Cells
from bagua.comm.store.serving import (
    close_store as close_store,
    connect_store as connect_store,
    meet_at as meet_at,
    open_store as open_store,
    serve_store as serve_store,
    serve_store_at as serve_store_at,
    thread_store as thread_store,
)
from bagua.comm.torch_backend.work import CallbackThread as CallbackThread
from bagua.comm.torch_backend.creation import install_torch_backend as install_torch_backend
from bagua.comm.torch_backend.work import BackwardWatch as BackwardWatch, TorchWork as TorchWork
from bagua.comm.torch_forms.factors import *
from bagua.comm.torch_forms.lists import (
    allgather_tensors as allgather_tensors,
    alltoall_rows as alltoall_rows,
    alltoall_tensors as alltoall_tensors,
    gather_tensors as gather_tensors,
    reduce_scatter_tensors as reduce_scatter_tensors,
    scatter_tensors as scatter_tensors,
)
from bagua.comm.torch_forms.tagged import mail_of as mail_of
from bagua.comm.transports.memory.copying import copy_flat as copy_flat
from bagua.comm.transports.registry import backend_refusal as backend_refusal, create_transport as create_transport
from bagua.comm.transports.threads import FaultHook as FaultHook, RankKilled as RankKilled, inject_fault as inject_fault
from bagua.comm.work import followed as followed
# isort: on

from bagua.late import late

if TYPE_CHECKING:
    from torch.distributed import reduce_op as reduce_op

__all__ = [
    "DONE",
    "NON_MEMBER",
    "Call",
    "Communicator",
    "Group",
    "Handle",
    "KindStatistics",
    "Membership",
    "NonMember",
    "ProcessGroup",
    "ReduceOp",
    "TorchBackendOptions",
    "Transport",
    "Work",
    "create_torch_group",
    "init_process_group",
    "register_transport",
    "solo_group",
]

__all__ += list(functional.FUNCTIONS)
__all__ += default_group.__all__

#: It warns whatever is asked of it, so it is not among what tools look through.
__getattr__ = late(__name__, {"reduce_op": "torch.distributed"})[0]
