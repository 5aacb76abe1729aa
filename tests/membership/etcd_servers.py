"""Servers of etcd on this machine, for as long as somebody needs them."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

ETCD = shutil.which("etcd")


@contextlib.contextmanager
def cluster(size: int, folder: Path) -> Iterator[tuple[list[tuple[str, int]], list[subprocess.Popen[bytes]]]]:
    """The servers of an etcd cluster on free ports, and their processes."""
    ports = free_ports(2 * size)
    peers = {f"s{number}": f"http://127.0.0.1:{ports[2 * number]}" for number in range(size)}
    servers = [("127.0.0.1", ports[2 * number + 1]) for number in range(size)]
    processes = [
        subprocess.Popen(
            [
                *(str(ETCD), "--name", name, "--data-dir", str(folder / name), "--unsafe-no-fsync"),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--listen-client-urls", f"http://127.0.0.1:{port}"),
                *("--advertise-client-urls", f"http://127.0.0.1:{port}"),
                *("--initial-cluster", ",".join(f"{other}={url}" for other, url in peers.items())),
                *("--heartbeat-interval=50", "--election-timeout=300"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for (name, peer), (_, port) in zip(peers.items(), servers, strict=True)
    ]
    try:
        yield servers, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def leader(servers: list[tuple[str, int]], processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """The process of the server that leads."""
    found = {}
    for (host, port), process in zip(servers, processes, strict=True):
        connection = http.client.HTTPConnection(host, port, timeout=5)
        connection.request("POST", "/v3/maintenance/status", "{}")
        status = json.loads(connection.getresponse().read())
        connection.close()
        found[status["header"]["member_id"]] = process
    return found[status["leader"]]
