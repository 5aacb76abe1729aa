"""Rendezvous stores for ranks that were started without a launcher: threads, and processes of one host."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore

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
