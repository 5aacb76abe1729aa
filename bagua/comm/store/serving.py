"""Rendezvous stores for ranks that were started without a launcher, and the one that a URL names."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore, rendezvous

_LOOPBACK = "127.0.0.1"


def thread_store() -> Store:
    """A store that the threads of this process share."""
    return HashStore()


def serve_store(address: str = _LOOPBACK, port: int = 0) -> tuple[Store, int]:
    """A store at this address, and its port, a free one for 0; it lives as long as the returned object."""
    store = TCPStore(address, port, is_master=True, wait_for_workers=False)
    return store, store.port


def connect_store(port: int, timeout_s: float, address: str = _LOOPBACK) -> Store:
    """The store that another process serves on ``port`` of ``address``.

    Args:
        port: as ``serve_store`` returned it there.
        timeout_s: deadline of the connection and of every later ``get`` and ``wait``, in seconds.
        address: address that was given to ``serve_store``.
    """
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def meet_at(url: str, rank: int, world_size: int, timeout: timedelta) -> tuple[Store, int, int]:
    """The store that ``url`` names, as torch understands it, and who this process is there.

    Args:
        url: ``tcp://host:port`` or ``file:///path``.
        rank: number of this process; -1 if the URL says it.
        world_size: number of processes; -1 if the URL says it.
        timeout: how long to wait for the store.
    """
    store, found_rank, found_size = next(rendezvous(url, rank, world_size, timeout=timeout))
    return store, found_rank, found_size
