"""Rendezvous stores for ranks that were started without a launcher, and the one that a URL names."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore, rendezvous

_LOOPBACK = "127.0.0.1"
#: Torch's own.
_TIMEOUT = timedelta(seconds=300)


def thread_store() -> Store:
    """A store that the threads of this process share."""
    return HashStore()


def serve_store(
    address: str = _LOOPBACK, port: int = 0, timeout: timedelta = _TIMEOUT, *, shared: bool = False
) -> tuple[Store, int]:
    """A store that listens at this address alone, and its port; it lives as long as the returned object.

    Torch listens on all interfaces, whatever it is told. So it does here for a name, which may mean another address on
    another host, and for an address that no interface has, because it is translated on the way to this host.

    Args:
        address: address of this host, ``localhost``, or a name.
        port: 0 for any free one.
        timeout: deadline of every later ``get`` and ``wait``.
        shared: True if several stores of this process may be on one port. They have one server then.
    """
    listener = _bound(address, port)
    port = port if listener is None else listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=shared,
        master_listen_fd=None if listener is None else listener.detach(),
    )  # fmt: skip
    return store, store.port


def _bound(address: str, port: int) -> socket.socket | None:
    """A socket at ``address`` alone. None for a name, and for what torch must decide: it may have a store there."""
    try:
        found = ipaddress.ip_address(_LOOPBACK if address == "localhost" else address)
    except ValueError:
        return None
    bound = socket.socket(socket.AF_INET if found.version == 4 else socket.AF_INET6)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((str(found), port))
    except OSError:
        bound.close()
        return None
    return bound


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
