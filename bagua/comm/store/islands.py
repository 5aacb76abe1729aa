"""The stores through which islands meet: where one is, and how it is served."""

from __future__ import annotations

import re
import socket
import time

from torch.distributed import DistNetworkError, PrefixStore
from torch.distributed import Store as KeyStore

from bagua.checks import check_kind
from bagua.comm.startup.rendezvous import wait_for_listener
from bagua.comm.store.bounded import BoundedStore
from bagua.comm.store.etcd import EtcdStore
from bagua.comm.store.keys import behind_token
from bagua.comm.store.polled import PolledStore
from bagua.comm.store.serving import connect_store, serve_store
from bagua.errors import ConfigurationError, StoreLostError

__all__ = ["KeyStore", "close_store", "open_store", "part_of", "serve_store_at"]

_FORMS = "tcp://host:port, or etcd://host:port,host:port,..."
_ETCD = re.compile(r"etcd://(?P<servers>[^/]+)/?")
_ETCD_PORT = 2379
#: Of one request, over all servers. An election takes up to 3 s with the default settings of etcd.
_ETCD_LIMIT_S = 5.0
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:/,]+):(?P<port>\d+)/?")


def open_store(where: str, timeout_s: float) -> KeyStore:
    """The store at ``where``; every call to it ends within seconds, whatever becomes of the store.

    Args:
        where: ``tcp://host:port``, as ``baguarun --serve-islands`` prints it, or ``etcd://host:port,host:port,...``
            with the servers of an etcd cluster.
        timeout_s: how long to wait until somebody listens there, and later for keys, in seconds.

    Raises:
        ConfigurationError: ``where`` has another form.
        StoreLostError: nothing listens there.
    """
    check_kind(str, _FORMS, where=where)
    tcp, etcd = _TCP.fullmatch(where), _ETCD.fullmatch(where)
    servers = [_server(text) for text in etcd["servers"].split(",")] if etcd is not None else []
    if servers and None not in servers:
        known = [one for one in servers if one is not None]
        return _reached(EtcdStore(known, timeout_s, min(_ETCD_LIMIT_S, max(timeout_s, 0.1))), where, timeout_s)
    if tcp is None:
        raise ConfigurationError(
            "not the address of a store where islands meet",
            argument="where",
            expected=_FORMS,
            seen=repr(where),
            advice="Start one with: baguarun --serve-islands",
        )
    host, port = tcp["host"].strip("[]"), int(tcp["port"])
    return BoundedStore(behind_token(_connected(where, host, port, timeout_s)), timeout_s)


def _server(text: str) -> tuple[str, int] | None:
    host, colon, port = text.rpartition(":") if ":" in text else (text, ":", str(_ETCD_PORT))
    return (host.strip("[]"), int(port)) if host and colon and port.isdigit() else None


def _reached(store: EtcdStore, where: str, timeout_s: float) -> KeyStore:
    """The store, once it has answered."""
    started = time.monotonic()
    while True:
        try:
            store.check(["any"])
        except DistNetworkError as error:
            elapsed_s = time.monotonic() - started
            if elapsed_s < timeout_s:
                time.sleep(0.1)
                continue
            store.close()
            raise StoreLostError(f"no server answers at {where}", elapsed_s=elapsed_s, timeout_s=timeout_s) from error
        return store


def _connected(where: str, host: str, port: int, timeout_s: float) -> KeyStore:
    started = time.monotonic()
    try:
        left_s = wait_for_listener(host, port, timeout_s)
        return connect_store(port, left_s, host)
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
        host: address of this host that others reach, where alone it listens; or a name, for all interfaces.
        port: 0 for any free one.

    Raises:
        ConfigurationError: the address is not this host's, or the port is taken.
    """
    try:
        socket.getaddrinfo(host, port)
        store, port_of_it = serve_store(host, port)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"no store can be served there: {str(error).partition(chr(10))[0]}",
            argument="--serve-islands",
            expected="an address of this host, and a free port",
            seen=f"{host}:{port}",
        ) from error
    return store, f"tcp://{f'[{host}]' if ':' in host else host}:{port_of_it}"


def close_store(store: KeyStore) -> None:
    """Give back what ``open_store`` took. Idempotent."""
    if isinstance(store, PolledStore):
        store.close()


def part_of(store: KeyStore, name: str) -> KeyStore:
    """The keys of ``store`` that begin with ``name``. Somebody keeps a reference to ``store``."""
    return PrefixStore(name, store)
