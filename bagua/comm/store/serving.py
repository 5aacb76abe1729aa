"""Stores where ranks and islands meet: how one is served, found and reached."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, HashStore, Store, TCPStore, rendezvous

from bagua import env
from bagua.checks import check_kind
from bagua.comm.lifetime.background import within
from bagua.comm.lifetime.forks import family
from bagua.comm.store.bucket import BUCKET, open_bucket
from bagua.comm.store.keys import BoundedStore, PolledStore, behind_token
from bagua.errors import ConfigurationError, StoreLostError

#: Of one request to one server. A server that was stopped never answers; the next one is asked soon.
_REQUEST_S = 0.5
#: Operations of one transaction, of 128 that servers allow.
_BATCH = 100
_PREFIX = "bagua"
#: Statuses from 400 to 499 after which another server, or the same one later, may do what was asked.
_MAY_PASS = frozenset({http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS})


class EtcdStore(PolledStore):
    """A store kept by an etcd cluster, through its JSON gateway. It asks one server after the other until one answers.

    It lives as long as a majority of the servers does.

    A request that was sent twice may have had its effect the first time: ``swap`` then says that it found what it
    wanted to write, and ``add`` may count twice.

    Args:
        servers: host and port of each.
        timeout_s: how long ``get`` and ``wait`` wait for a key, in seconds.
        limit_s: longest time of each request over all servers, in seconds: longer than an election takes.
    """

    def __init__(self, servers: Sequence[tuple[str, int]], timeout_s: float, limit_s: float = 5.0) -> None:
        super().__init__(timeout_s)
        self._servers = list(servers)
        self._limit_s = limit_s
        self._turn = 0
        self._connection: http.client.HTTPConnection | None = None
        self._asking = threading.RLock()
        self._cluster = ""
        family.add(self)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = []
        for start in range(0, len(keys), _BATCH):
            wanted = [{"requestRange": {"key": _key(key)}} for key in keys[start : start + _BATCH]]
            answers = self._ask("txn", {"success": wanted})["responses"]
            found += [_value(answer["response_range"]) for answer in answers]
        return found

    def write(self, key: str, value: bytes) -> None:
        self._ask("put", {"key": _key(key), "value": _encoded(value)})

    def swap(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes]:
        name = _key(key)
        unchanged: dict[str, Any] = {"key": name, "result": "EQUAL"}
        if expected:
            unchanged |= {"target": "VALUE", "value": _encoded(expected)}
        else:
            unchanged |= {"target": "CREATE", "create_revision": "0"}
        put = {"requestPut": {"key": name, "value": _encoded(desired)}}
        get = {"requestRange": {"key": name}}
        answer = self._ask("txn", {"compare": [unchanged], "success": [put], "failure": [get]})
        if answer.get("succeeded"):
            return True, desired
        return False, _value(answer["responses"][0]["response_range"]) or expected

    def remove(self, key: str) -> bool:
        return int(self._ask("deleterange", {"key": _key(key)}).get("deleted", 0)) > 0

    def _ask(self, what: str, question: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first server that gives one."""
        body = json.dumps(question)
        deadline = time.monotonic() + self._limit_s
        with self._asking:
            while True:
                try:
                    return self._answer(what, body)
                except ConfigurationError:  # No other server says otherwise.
                    raise
                except (OSError, http.client.HTTPException, ValueError) as error:
                    self.close()
                    self._turn += 1
                    if time.monotonic() > deadline:
                        raise DistNetworkError(f"no server of etcd answered within {self._limit_s:g} s") from error
                    if self._turn % len(self._servers) == 0:
                        time.sleep(0.02)

    def _answer(self, what: str, body: str) -> dict[str, Any]:
        connection = self._connection  # ``close`` may come meanwhile, in another thread.
        if connection is None:
            host, port = self._servers[self._turn % len(self._servers)]
            connection = self._connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_S)
        connection.request("POST", f"/v3/kv/{what}", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        if 400 <= response.status < 500 and response.status not in _MAY_PASS:
            raise self._refusal(response.status, text)
        if response.status != http.client.OK:
            raise http.client.HTTPException(f"{response.status}: {text[:200]!r}")
        try:
            answer: dict[str, Any] = json.loads(text)
            cluster = answer["header"]["cluster_id"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no answer of etcd: {text[:200]!r}") from error
        self._cluster = self._cluster or cluster
        if cluster != self._cluster:
            raise DistNetworkError(f"the servers belong to two clusters of etcd: {self._cluster} and {cluster}")
        return answer

    def _refusal(self, status: int, text: bytes) -> ConfigurationError:
        """What the server says will be no other on the next server of the cluster, nor later."""
        host, port = self._servers[self._turn % len(self._servers)]
        self.close()
        return ConfigurationError(
            f"{host}:{port} refuses what bagua asks of etcd",
            argument="where",
            expected="a server of etcd 3.4 or later, without authentication",
            seen=f"status {status}: {text[:200].decode(errors='replace')}",
        )

    def close(self) -> None:
        """See ``PolledStore``. The next request connects again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def disown(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._asking = threading.RLock()
        self._connection = None


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _key(key: str) -> str:
    return _encoded("/".join(filter(None, [_PREFIX, env.token(), key])).encode())


def _value(answer: dict[str, Any]) -> bytes | None:
    found = answer.get("kvs")
    return base64.b64decode(found[0].get("value", "")) if found else None


_LOOPBACK = "127.0.0.1"
#: Torch's own.
_TIMEOUT = timedelta(seconds=300)
_FORMS = "tcp://host:port, etcd://host:port,host:port,..., or file://, s3://, gs:// or az:// with a path"
_ETCD = re.compile(r"etcd://(?P<servers>[^/]+)/?")
_ETCD_PORT = 2379
#: Of one request, over all servers. An election takes up to 3 s with the default settings of etcd.
_ETCD_LIMIT_S = 5.0
_TCP = re.compile(r"tcp://(?P<host>\[[^]]+\]|[^:/,]+):(?P<port>\d+)/?")


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

    Raises:
        RuntimeError: nothing listens there, or something else than a store.
        TimeoutError: nothing answers in time.
    """
    limit = timedelta(seconds=timeout_s)
    # Torch waits without end for the answer of a server that is no store.
    return within(timeout_s, lambda: TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit))


def wait_for_listener(address: str, port: int, timeout_s: float) -> float:
    """Wait until somebody listens at ``address``; the seconds that are left.

    TCPStore would do the same, but goes on for long after its timeout, and prints a stack trace for each attempt.

    Raises:
        OSError: no process does.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(min(left_s, 5.0), 0.05)).close()
            return max(deadline - time.monotonic(), 1.0)
        except OSError:
            if left_s <= 0:
                raise
        time.sleep(min(pause_s, max(left_s, 0.0)))
        pause_s = min(2 * pause_s, 0.5)


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


# Stores of islands.


def open_store(where: str, timeout_s: float, objects: Any = None) -> Store:
    """The store at ``where``; every call to it ends within seconds, whatever becomes of the store.

    Args:
        where: ``tcp://host:port``, as ``baguarun --serve-islands`` prints it, or ``etcd://host:port,host:port,...``
            with the servers of an etcd cluster; or a bucket, see ``open_bucket``.
        timeout_s: how long to wait until somebody listens there, and later for keys, in seconds.
        objects: store of obstore for a bucket; None for others, or to make one from the environment.

    Raises:
        ConfigurationError: ``where`` has another form.
        StoreLostError: nothing listens there.
    """
    check_kind(str, _FORMS, where=where)
    if objects is not None or BUCKET.fullmatch(where):
        return open_bucket(where, timeout_s, objects)
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
            seen="one with an @ or a ?, which may hold a secret" if {"@", "?"} & {*where} else repr(where),
            advice="Start one with: baguarun --serve-islands",
        )
    host, port = tcp["host"].strip("[]"), int(tcp["port"])
    return BoundedStore(behind_token(_connected(where, host, port, timeout_s)), timeout_s)


def _server(text: str) -> tuple[str, int] | None:
    host, colon, port = text.rpartition(":") if ":" in text else (text, ":", str(_ETCD_PORT))
    return (host.strip("[]"), int(port)) if host and colon and port.isdigit() else None


def _reached(store: EtcdStore, where: str, timeout_s: float) -> Store:
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


def _connected(where: str, host: str, port: int, timeout_s: float) -> Store:
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


def serve_store_at(host: str, port: int) -> tuple[Store, str]:
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


def close_store(store: Store) -> None:
    """Give back what ``open_store`` took. Idempotent."""
    if isinstance(store, PolledStore):
        store.close()
