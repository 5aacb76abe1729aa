"""What the names of ``torch.distributed`` need beyond our collectives: stores, lists of tensors, tags.

A door of its own: only ``bagua.distributed`` needs it.
"""

from bagua.comm.torch_forms.factors import is_scaled, make_premul_sum, scale, scaled
from bagua.comm.torch_forms.lists import (
    allgather_tensors,
    alltoall_rows,
    alltoall_tensors,
    gather_tensors,
    reduce_scatter_tensors,
    scatter_tensors,
)
from bagua.comm.torch_forms.names import (
    Backend,
    DistStoreError,
    FileStore,
    HashStore,
    PrefixStore,
    QueueEmptyError,
    Store,
    TCPStore,
    default_pg_timeout,
    get_default_backend_for_device,
    get_node_local_rank,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_torchelastic_launched,
    is_ucc_available,
    is_xccl_available,
    meet_at,
)
from bagua.comm.torch_forms.tagged import TaggedReceive, mail_of

__all__ = [
    "Backend",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "TCPStore",
    "TaggedReceive",
    "allgather_tensors",
    "alltoall_rows",
    "alltoall_tensors",
    "default_pg_timeout",
    "gather_tensors",
    "get_default_backend_for_device",
    "get_node_local_rank",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_scaled",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "mail_of",
    "make_premul_sum",
    "meet_at",
    "reduce_scatter_tensors",
    "scale",
    "scaled",
    "scatter_tensors",
]
