"""Servers on this machine for tests: S3 as moto serves it, a folder, and etcd."""

import contextlib
import http.client
import importlib.util
import itertools
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagua.comm.store.bucket import BucketStore, ObjectBucket, RequestHook, open_bucket

needs_obstore = pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="obstore is not installed")
needs_moto = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("obstore", "moto", "flask", "boto3")),
    reason="moto's server is not installed",
)
_numbers = itertools.count()
#: They must appear in no message.
KEY, SECRET = "AKIAEXAMPLEKEY", "averysecretword"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server of S3."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
        boto3.DEFAULT_SESSION = None


def new_s3(endpoint: str) -> Any:
    """A bucket of its own on the server, as a store of obstore."""
    import boto3
    from obstore.store import S3Store

    name = f"bagua-test-{next(_numbers)}"
    given = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    client = boto3.session.Session().client("s3", endpoint_url=endpoint, **given)
    client.create_bucket(Bucket=name)
    client.close()
    return S3Store(
        name, prefix="run", endpoint=endpoint, access_key_id=KEY, secret_access_key=SECRET, region="us-east-1",
        client_options={"allow_http": True},
    )  # fmt: skip


def opened(where: str, objects: Any = None, hook: RequestHook | None = None, timeout_s: float = 20.0) -> BucketStore:
    """A store of its own in the bucket, as another process has one."""
    store = open_bucket(where, timeout_s, objects)
    store.bucket.hook = hook
    return store


def names(bucket: ObjectBucket, prefix: str = "objects") -> list[str]:
    """Names of the objects that begin so."""
    return sorted(bucket.list(prefix))


def is_counted(name: str, trainer: int) -> bool:
    """Whether a request of this thread belongs to the training of ``trainer``: other threads put and get, too."""
    thread = threading.current_thread()
    trains = trainer == thread.ident or thread.name.startswith("bagua-solo")  # beside training
    return trains or (name.startswith("objects/") and not name.startswith("objects/state-"))  # no part of a state


ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed: apt-get install etcd-server")


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
