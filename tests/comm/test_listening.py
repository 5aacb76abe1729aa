"""What listens where, who is reached from another host, and what a token keeps apart."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import os
import socket
import threading
from pathlib import Path

import pytest
import torch

import bagua.comm
from bagua.comm.store.beats import Beats, connect_beats
from bagua.comm.store.etcd import EtcdStore
from bagua.comm.store.serving import connect_store, serve_store
from bagua.errors import CollectiveTimeoutError, ConfigurationError, StoreLostError
from bagua.testing import ProcessRanks
from bagua.testing.ranks import this_rank
from tests.launching import free_port

PROCESSES = ProcessRanks(2, backend=None)
#: The loopback device has more than one address, and who listens on all interfaces is reached by each.
OTHER = "127.0.0.2"


def reached(address: str, port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, port), timeout=5.0):
        return True
    return False


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", OTHER])
def test_a_store_listens_at_its_address_alone(address):
    store, port = serve_store(address)
    assert reached(address, port)
    assert not reached("127.0.0.1" if address == OTHER else OTHER, port)
    connect_store(port, 10.0, address).set("asked", "here")
    assert store.get("asked") == b"here"


def test_a_name_may_mean_another_address_elsewhere_so_all_interfaces_listen():
    store, port = serve_store(socket.gethostname())
    assert reached("127.0.0.1", port)
    assert reached(OTHER, port)
    del store


def test_an_address_that_no_interface_has_is_left_to_torch():
    with pytest.raises(ConfigurationError, match="no store can be served there"):
        bagua.comm.serve_store_at("not.a.host.invalid", 0)


def listening() -> set[str]:
    """Addresses at which this process listens."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # That of the folder itself.
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def listen_as_launched(port, backend):
    rank = this_rank.get().rank
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for _ in range(2):  # The process that hosts the store uses it again.
        bagua.comm.init_process_group(backend=backend, timeout=20.0)
        tensor = torch.ones(2)
        bagua.comm.allreduce(tensor)
        found = listening()
        bagua.comm.destroy_process_group()
    return tensor.tolist(), found


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs the tables of Linux")
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_ranks_of_one_host_listen_on_the_loopback_device(backend):
    found = PROCESSES.run(listen_as_launched, free_port(), backend, size=2)
    assert found == [([2.0, 2.0], {"0100007F"})] * 2


# A token.


def start_with_tokens(port, tokens):
    rank = this_rank.get().rank
    os.environ.update({"BAGUA_TOKEN": tokens[rank]} if tokens[rank] else {})
    store, same = connect_store(port, 10.0), len(set(tokens)) == 1
    init = {"backend": "gloo", "store": store, "rank": rank, "world_size": 2}
    if same:
        bagua.comm.init_process_group(**init, timeout=20.0)
        bagua.comm.get_default_group().global_communicator.barrier()
        Beats(store, rank).post_now({"world_size": 2})
        return None
    with pytest.raises(CollectiveTimeoutError, match="with the same BAGUA_TOKEN") as caught:
        bagua.comm.init_process_group(**init, timeout=0.5)
    return caught.value.peers


@pytest.mark.gloo
def test_ranks_with_one_token_meet_under_it(monkeypatch):
    store, port = serve_store()
    PROCESSES.run(start_with_tokens, port, ["quiet", "quiet"], size=2)
    assert {key.strip("/").partition("/")[0] for key in store.list_keys()} == {"quiet"}
    assert connect_beats("127.0.0.1", port).read() == {}
    monkeypatch.setenv("BAGUA_TOKEN", "quiet")
    assert set(connect_beats("127.0.0.1", port).read()) == {0, 1}


@pytest.mark.gloo
@pytest.mark.parametrize("tokens", [["quiet", "loud"], ["quiet", ""]])
def test_ranks_with_other_tokens_do_not_see_each_other(tokens, port):
    assert PROCESSES.run(start_with_tokens, port, tokens, size=2) == [(1,), (0,)]


def test_islands_with_other_tokens_do_not_see_each_other(monkeypatch):
    server, where = bagua.comm.serve_store_at("127.0.0.1", 0)
    stores = []
    for token in ("quiet", "quiet", "loud", ""):
        monkeypatch.setenv("BAGUA_TOKEN", token)
        stores.append(bagua.comm.open_store(where, 10.0))
    stores[0].set("cell", "written")
    assert [store.check(["cell"]) for store in stores] == [True, True, False, False]
    for store in stores:
        bagua.comm.close_store(store)
    del server


# Answers of etcd.


class Server(http.server.BaseHTTPRequestHandler):
    """A server of etcd that gives the answers it is told to."""

    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, body = self.server.answers[min(len(self.server.asked), len(self.server.answers)) - 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def answering(*answers):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.answers, server.asked = answers, []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


GOOD = (200, b'{"header": {"cluster_id": "1"}, "responses": [{"response_range": {}}]}')


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_etcd_refuses_is_asked_once(status):
    with answering((status, b"user name is empty")) as one, answering(GOOD) as two:
        store = EtcdStore([one.server_address, two.server_address], timeout_s=1.0)
        with pytest.raises(ConfigurationError, match=f"status {status}: user name is empty"):
            store.check(["any"])
        with pytest.raises(ConfigurationError, match="refuses what bagua asks of etcd"):
            bagua.comm.open_store(f"etcd://127.0.0.1:{one.server_address[1]}", 1.0)
    assert (len(one.asked), len(two.asked)) == (2, 0)


@pytest.mark.parametrize("status", [408, 429, 500, 503, 504])
def test_what_another_server_may_do_is_asked_there(status):
    with answering((status, b"no leader")) as one, answering(GOOD) as two:
        store = EtcdStore([one.server_address, two.server_address], timeout_s=1.0)
        assert not store.check(["any"])
        store.close()
    assert (len(one.asked), len(two.asked)) == (1, 1)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b'{"header": 1}'])
def test_a_server_that_is_no_etcd_is_a_typed_error(body):
    with answering((200, body)) as server, pytest.raises(StoreLostError, match="no server answers at etcd://"):
        bagua.comm.open_store(f"etcd://127.0.0.1:{server.server_address[1]}", 0.2)


def test_a_token_begins_keys_of_etcd(monkeypatch):
    monkeypatch.setenv("BAGUA_TOKEN", "quiet")
    with answering(GOOD) as server:
        store = EtcdStore([server.server_address], timeout_s=1.0)
        store.check(["cell"])
        store.close()
    (question,) = server.asked[0]["success"]
    assert base64.b64decode(question["requestRange"]["key"]) == b"bagua/quiet/cell"
