"""A store kept by an etcd cluster, through its JSON gateway. It lives as long as a majority of the servers does."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed import DistNetworkError

from bagua import env
from bagua.comm.lifetime.forks import family
from bagua.comm.store.polled import PolledStore
from bagua.errors import ConfigurationError

#: Of one request to one server. A server that was stopped never answers; the next one is asked soon.
_REQUEST_S = 0.5
#: Operations of one transaction, of 128 that servers allow.
_BATCH = 100
_PREFIX = "bagua"
#: Statuses from 400 to 499 after which another server, or the same one later, may do what was asked.
_MAY_PASS = frozenset({http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS})


class EtcdStore(PolledStore):
    """Asks one server after the other until one answers.

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
                    self._next_server()
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
            self._check_cluster(answer["header"]["cluster_id"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no answer of etcd: {text[:200]!r}") from error
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

    def _check_cluster(self, cluster: str) -> None:
        self._cluster = self._cluster or cluster
        if cluster != self._cluster:
            raise DistNetworkError(f"the servers belong to two clusters of etcd: {self._cluster} and {cluster}")

    def _next_server(self) -> None:
        self.close()
        self._turn += 1

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
