"""Where ranks meet: what listens where, who is let in, and a store whose host is stopped."""

import base64
import contextlib
import http.server
import json
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import bagua.comm
from bagua import errors
from bagua.comm import Beats, Membership, PhaseDeadline, connect_beats, consult, gather_values, group_of_seats
from bagua.comm.startup import formation as seats
from bagua.comm.store.serving import EtcdStore, connect_store, serve_store, thread_store
from bagua.comm.transports.failure import FailureFinder
from bagua.testing import ProcessRanks, this_rank
from tests.harness import on_ranks, stop_process
from tests.launching import free_port, launched

PROCESSES = ProcessRanks(2, backend=None)
processes, free = pytest.fixture(lambda: PROCESSES), pytest.fixture(free_port)
#: The loopback device has more than one address, and who listens on all interfaces is reached by each.
OTHER = "127.0.0.2"


def reached(address: str, port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, port), timeout=5.0):
        return True
    return False


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", OTHER])
def test_a_store_listens_at_its_address_alone(address):
    for attempt in range(5):  # Somebody else may listen at the other address, at the same port.
        store, port = serve_store(address)
        assert reached(address, port)
        if not reached("127.0.0.1" if address == OTHER else OTHER, port):
            break
        assert attempt < 4
    connect_store(port, 10.0, address).set("asked", "here")
    assert store.get("asked") == b"here"


def test_a_name_may_mean_another_address_elsewhere_so_all_interfaces_listen():
    store, port = serve_store(socket.gethostname())
    assert reached("127.0.0.1", port)
    assert reached(OTHER, port)
    del store


def test_an_address_that_no_interface_has_is_left_to_torch():
    with pytest.raises(errors.ConfigurationError, match="no store can be served there"):
        bagua.comm.serve_store_at("not.a.host.invalid", 0)


def listening() -> set[str]:
    """Addresses at which this process listens."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # That of the folder itself.
            own.add(os.readlink(f"/proc/self/fd/{name}"))
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


@pytest.mark.gloo
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs the tables of Linux")
@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_ranks(2, pool="processes")
def test_ranks_of_one_host_listen_on_the_loopback_device(free, backend):
    rank = this_rank.get().rank
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free))
    for _ in range(2):  # The process that hosts the store uses it again.
        bagua.comm.init_process_group(backend=backend, timeout=20.0)
        tensor = torch.ones(2)
        bagua.comm.allreduce(tensor)
        found = listening()
        bagua.comm.destroy_process_group()
    assert (tensor.tolist(), found) == ([2.0, 2.0], {"0100007F"})


def start_with_tokens(port, tokens):
    rank = this_rank.get().rank
    os.environ.update({"BAGUA_TOKEN": tokens[rank]} if tokens[rank] else {})
    store = connect_store(port, 10.0)
    init = {"backend": "gloo", "store": store, "rank": rank, "world_size": 2}
    if tokens[0] == tokens[1]:
        bagua.comm.init_process_group(**init, timeout=20.0)
        bagua.comm.get_default_group().global_communicator.barrier()
        Beats(store, rank).post_now({"world_size": 2})
        return None
    with pytest.raises(errors.CollectiveTimeoutError, match="with the same BAGUA_TOKEN") as caught:
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


def test_islands_with_other_tokens_do_not_see_each_other(where, monkeypatch):
    stores = []
    for token in ("quiet", "quiet", "loud", ""):
        monkeypatch.setenv("BAGUA_TOKEN", token)
        stores.append(bagua.comm.open_store(where, 10.0))
    stores[0].set("cell", "written")
    assert [store.check(["cell"]) for store in stores] == [True, True, False, False]
    for store in stores:
        bagua.comm.close_store(store)


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
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server, ThreadPoolExecutor(1) as thread:
        server.answers, server.asked = answers, []
        thread.submit(server.serve_forever, 0.01)
        try:
            yield server
        finally:
            server.shutdown()


GOOD = (200, b'{"header": {"cluster_id": "1"}, "responses": [{"response_range": {}}]}')


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_what_etcd_refuses_is_asked_once(status):
    with answering((status, b"user name is empty")) as one, answering(GOOD) as two:
        store = EtcdStore([one.server_address, two.server_address], timeout_s=1.0)
        with pytest.raises(errors.ConfigurationError, match=f"status {status}: user name is empty"):
            store.check(["any"])
        with pytest.raises(errors.ConfigurationError, match="refuses what bagua asks of etcd"):
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
    with answering((200, body)) as server, pytest.raises(errors.StoreLostError, match="no server answers at etcd://"):
        bagua.comm.open_store(f"etcd://127.0.0.1:{server.server_address[1]}", 0.2)


def test_a_token_begins_keys_of_etcd(monkeypatch):
    monkeypatch.setenv("BAGUA_TOKEN", "quiet")
    with answering(GOOD) as server:
        store = EtcdStore([server.server_address], timeout_s=1.0)
        store.check(["cell"])
        store.close()
    (question,) = server.asked[0]["success"]
    assert base64.b64decode(question["requestRange"]["key"]) == b"bagua/quiet/cell"


HOST = """
import os, sys
from bagua.comm.store.serving import serve_store
store, port = serve_store()
print(port, os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host(monkeypatch):
    """A store, and how to stop the process that hosts it, and to let it go on."""
    monkeypatch.setattr("bagua.comm.store.keys._LEAST_S", 0.05)
    with launched(1, "-c", HOST) as (process,):
        port, pid = map(int, process.stdout.readline().split())
        go_on = partial(os.kill, pid, signal.SIGCONT)
        yield SimpleNamespace(store=connect_store(port, 20.0), stop=partial(stop_process, pid), go_on=go_on)
        go_on()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "ask",
    [
        lambda store: gather_values(store, "subject", 1, (0, 1), "here", 0.05),
        lambda store: consult(store, "subject", 1, 1, (0, 1), "here", sum, 0.05),
        lambda store: seats.fresh(store, 1, (0, 1), 0.05),
        lambda store: FailureFinder(Membership(store, 1, (0, 1), (0, 0), 0.05), lambda: None, bool),
    ],
    ids=["gather_values", "consult", "fresh", "failure finder"],
)
def test_ranks_that_meet_name_the_host_that_is_stopped(host, ask):
    host.stop()
    with pytest.raises(errors.CollectiveTimeoutError, match="does not answer rank 1") as caught:
        ask(host.store)
    assert caught.value.peers == (0,)
    assert "stopped" in caught.value.advice


@pytest.mark.gloo
def test_ranks_that_do_not_come_are_named_when_the_host_answers(host):
    """The questions after the deadline are answered, too: who is missing is one of them."""
    with pytest.raises(errors.CollectiveTimeoutError, match="1 of 2 ranks did not come") as caught:
        gather_values(host.store, "subject", 0, (0, 1), "here", 0.0)
    assert caught.value.peers == (1,)


@pytest.mark.gloo
def test_ranks_go_on_when_the_host_does(host):
    host.stop()
    with pytest.raises(errors.CollectiveTimeoutError):
        gather_values(host.store, "subject", 0, (0,), "here", 0.05)
    host.go_on()
    assert gather_values(host.store, "another", 0, (0,), "here", 20.0) == ["here"]


@pytest.mark.gloo
def test_what_a_group_asks_of_its_store_ends(host):
    """A connection that is first needed then is not waited for."""
    options = {"backend": "gloo", "timeout_s": 0.05, "meet_s": 20.0}
    group, other = (group_of_seats(host.store, [0], 0, name, **options) for name in ("group", "other"))
    mail = bagua.comm.torch_forms.mail_of(group.global_communicator)
    host.stop()
    for problem, ask in (
        ("does not answer", lambda: group.subgroup([0])),
        ("messages with a tag", lambda: mail.find([0], 7)),
        ("messages with a tag", lambda: mail.receive(torch.zeros(1), 0, 7).wait()),
        ("does not answer", lambda: bagua.comm.torch_forms.mail_of(other.global_communicator)),
        ("does not answer", lambda: other.connect([0], "more", timeout_s=0.05)),
    ):
        with pytest.raises(errors.CollectiveTimeoutError, match=problem):
            ask()
    group.close()
    other.close()


LONG_S = 60.0


def meet(store, own, look=None):
    return group_of_seats(store, [3, 5], own, "epoch1", backend="threads", timeout_s=LONG_S, meet_s=LONG_S, look=look)


def test_who_comes_after_another_has_gone_does_not_wait_for_it():
    store = thread_store()
    with pytest.raises(errors.CommunicatorClosedError, match="it left"):
        meet(store, 3, Mock(side_effect=[None, errors.CommunicatorClosedError("it left")]))
    with pytest.raises(errors.PeerLostError, match="has gone before all were there"):
        meet(store, 5)


def test_who_has_left_does_not_come():
    store = thread_store()
    with pytest.raises(errors.CommunicatorClosedError, match="it left"):
        meet(store, 3, Mock(side_effect=errors.CommunicatorClosedError("it left")))
    assert not torch.distributed.PrefixStore("epoch1", store).check(["here/0"])


def test_who_wants_to_go_when_all_have_met_connects_with_them():
    store = thread_store()
    members = torch.distributed.PrefixStore("epoch1", store)
    looks = 0

    def look():
        nonlocal looks
        looks += 1
        if looks > 1:  # The other one comes, and sees this one, before this one looks again.
            members.compare_set("meeting", "", "on")
            raise errors.CommunicatorClosedError("it left")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, store, 3, look)
        while not members.check(["meeting"]):
            assert not first.done()
        groups = [pool.submit(meet, store, 5).result(LONG_S), first.result(LONG_S)]
    assert [group.rank for group in groups] == [1, 0]
    for group in groups:
        group.close()


def test_to_connect_may_take_as_long_as_usual_and_longer_after_a_failure(monkeypatch):
    deadline = PhaseDeadline(10.0, 3.0)
    connects = [DEFAULT, DEFAULT, errors.PeerLostError("it has gone", peers=[5]), DEFAULT]
    made = Mock(wraps=seats.ProcessGroup, side_effect=connects)
    monkeypatch.setattr(seats, "ProcessGroup", made)

    def connect(name):
        arguments = {"backend": "threads", "timeout_s": LONG_S, "meet_s": LONG_S, "connecting": deadline}
        group_of_seats(thread_store(), [3], 3, name, **arguments).close()

    connect("epoch1")
    connect("epoch2")
    with pytest.raises(errors.PeerLostError, match="it has gone"):
        connect("epoch3")
    connect("epoch4")
    assert [call.args[5] for call in made.call_args_list] == [10.0, 3.0, 3.0, 10.0]
