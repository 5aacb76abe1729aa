"""Rendezvous stores for ranks that were started without a launcher: threads, and processes of one host."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore

__all__ = ["connect_store", "serve_store", "thread_store"]

_LOOPBACK = "127.0.0.1"


def thread_store() -> Store:
    """A store that the threads of this process share."""
    return HashStore()


def serve_store() -> tuple[Store, int]:
    """A store on a free port of the loopback device, and that port; it lives as long as the returned object."""
    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    return store, store.port


def connect_store(port: int, timeout_s: float) -> Store:
    """The store that another process of this host serves on ``port``.

    Args:
        port: as ``serve_store`` returned it there.
        timeout_s: deadline of the connection and of every later ``get`` and ``wait``, in seconds.
    """
    return TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
