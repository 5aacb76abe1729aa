"""The stores through which islands meet: where one is, and how it is served."""

from __future__ import annotations

import re
import socket
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed import Store as KeyStore

from bagua.checks import check_kind
from bagua.comm.startup.rendezvous import wait_for_listener
from bagua.comm.store.polled import BoundedStore
from bagua.errors import ConfigurationError, StoreLostError

__all__ = ["KeyStore", "open_store", "part_of", "serve_store_at"]

_FORMS = "tcp://host:port"
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:/,]+):(?P<port>\d+)/?")


def open_store(where: str, timeout_s: float) -> KeyStore:
    """The store at ``where``; every call to it ends within seconds, whatever becomes of the store.

    Args:
        where: ``tcp://host:port``, as ``baguarun --serve-islands`` prints it.
        timeout_s: how long to wait until somebody listens there, and later for keys, in seconds.

    Raises:
        ConfigurationError: ``where`` has another form.
        StoreLostError: nobody listens there.
    """
    check_kind(str, _FORMS, where=where)
    tcp = _TCP.fullmatch(where)
    if tcp is None:
        raise ConfigurationError(
            "not the address of a store where islands meet",
            argument="where",
            expected=_FORMS,
            seen=repr(where),
            advice="Start one with: baguarun --serve-islands",
        )
    host, port = tcp["host"].strip("[]"), int(tcp["port"])
    return BoundedStore(_connected(where, host, port, timeout_s), timeout_s)


def _connected(where: str, host: str, port: int, timeout_s: float) -> KeyStore:
    started = time.monotonic()
    try:
        left_s = wait_for_listener(host, port, timeout_s)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=left_s))
    except (OSError, RuntimeError) as error:
        raise StoreLostError(
            f"no store answers at {where}",
            elapsed_s=time.monotonic() - started,
            timeout_s=timeout_s,
            advice=f"Start it with: baguarun --serve-islands {host}:{port}",
        ) from error


def serve_store_at(host: str, port: int) -> tuple[KeyStore, str]:
    """A store that lives as long as the returned object, and its address.

    Args:
        host: name or address of this host that others reach.
        port: 0 for any free one.

    Raises:
        ConfigurationError: the address is not this host's, or the port is taken.
    """
    try:
        socket.getaddrinfo(host, port)
        store = TCPStore(host, port, is_master=True, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"no store can be served there: {str(error).partition(chr(10))[0]}",
            argument="--serve-islands",
            expected="an address of this host, and a free port",
            seen=f"{host}:{port}",
        ) from error
    return store, f"tcp://{host}:{store.port}"


def part_of(store: KeyStore, name: str) -> KeyStore:
    """The keys of ``store`` that begin with ``name``. Somebody keeps a reference to ``store``."""
    return PrefixStore(name, store)
