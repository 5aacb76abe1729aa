"""What of ``torch.distributed`` is used as it is: stores, facts about the installation, and how ranks meet at a URL."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (
    Backend,
    DistStoreError,
    FileStore,
    HashStore,
    PrefixStore,
    QueueEmptyError,
    Store,
    TCPStore,
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
)
from torch.distributed.constants import default_pg_timeout

__all__ = [
    "Backend",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "TCPStore",
    "default_pg_timeout",
    "get_default_backend_for_device",
    "get_node_local_rank",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "meet_at",
]


def meet_at(url: str, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, int, int]:
    """The store that ``url`` names, as torch understands it, and who this process is there.

    Args:
        url: ``tcp://host:port`` or ``file:///path``.
        rank: number of this process; -1 if the URL says it.
        world_size: number of processes; -1 if the URL says it.
        timeout: how long to wait for the store.
    """
    store, found_rank, found_size = next(dist.rendezvous(url, rank, world_size, timeout=timeout))
    return store, found_rank, found_size
