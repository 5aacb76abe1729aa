"""Stores where islands meet: those of torch under a bound, and etcd with one to three servers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore

from bagua.comm import Cells, group_of_seats, open_store, serve_store_at
from bagua.comm.store.bounded import BoundedStore
from bagua.comm.store.etcd import EtcdStore
from bagua.comm.store.polled import PolledStore
from bagua.errors import ConfigurationError, StoreLostError
from bagua.membership.state import Deadlines
from tests.membership.etcd_servers import ETCD, cluster, free_ports, leader
from tests.membership.training import PERIOD, check_rows, joined, run, survivors, train, vanish, wrapped

#: Each island has a store of its own here, so that silence is a matter of time.
DEADLINES = Deadlines(beat_s=0.05, silence_s=8.0, suspect_s=2.0, meet_s=60.0, poll_s=0.01)
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed: apt-get install etcd-server")


@pytest.fixture(params=["bounded", pytest.param("etcd", marks=needs_etcd)])
def store(request, tmp_path) -> Iterator[PolledStore]:
    if request.param == "bounded":
        found = BoundedStore(HashStore(), timeout_s=5.0)
        yield found
        found.close()
        return
    with cluster(1, tmp_path) as (servers, _):
        where = ",".join(f"{host}:{port}" for host, port in servers)
        found = open_store(f"etcd://{where}", timeout_s=20.0)
        yield found
        found.close()


def test_a_store_does_what_torch_expects_of_one(store):
    part = PrefixStore("part", store)
    part.set("a", "1")
    assert (part.get("a"), store.get("part/a"), part.check(["a"]), part.check(["a", "b"])) == (b"1", b"1", True, False)
    assert part.compare_set("cell", "", "first") == b"first"
    assert part.compare_set("cell", "", "second") == b"first"
    assert part.compare_set("cell", "first", "third") == b"third"
    assert [part.add("count", 2), part.add("count", -1)] == [2, 1]
    part.multi_set(["x", "y"], ["7", "8"])
    assert part.multi_get(["x", "y"]) == [b"7", b"8"]
    part.append("x", "9")
    assert part.get("x") == b"79"
    assert (part.delete_key("a"), part.delete_key("a"), part.check(["a"])) == (True, False, False)
    store.set("bytes", b"\xff\x00")
    assert store.get("bytes") == b"\xff\x00"
    threading.Timer(0.05, lambda: part.set("late", "here")).start()
    assert part.get("late") == b"here"
    with pytest.raises(DistStoreError, match="wait timeout after 20ms"):
        store.wait(["never"], timedelta(seconds=0.02))
    cells = Cells(part)
    assert (cells.claim("epoch/1", [1]), cells.claim("epoch/1", [2]), cells.read(["epoch/1", "no"])) == (
        *([1], [1]),
        [[1], None],
    )


@pytest.mark.gloo
def test_groups_of_gloo_meet_over_such_a_store(store):
    groups: dict[int, object] = {}

    def meet(seat: int) -> None:
        groups[seat] = group_of_seats(store, [3, 8], seat, "epoch1", backend="gloo", timeout_s=10.0, meet_s=10.0)

    other = threading.Thread(target=meet, args=(8,))
    other.start()
    meet(3)
    other.join(60)
    assert [groups[seat].ranks for seat in (3, 8)] == [(3, 8)] * 2
    for group in groups.values():
        group.close()


@needs_etcd
def test_a_cluster_survives_the_loss_of_any_server(tmp_path):
    with cluster(3, tmp_path) as (servers, processes):
        where = ",".join(f"{host}:{port}" for host, port in servers)
        store = open_store(f"etcd://{where}", timeout_s=20.0)
        store.set("a", "1")
        processes[0].kill()  # The one that is asked first; it may be the leader.
        assert store.get("a") == b"1"
        os.kill(processes[1].pid, signal.SIGSTOP)  # No majority is left.
        hasty = EtcdStore(servers, timeout_s=1.0, limit_s=0.2)
        with pytest.raises(StoreLostError, match="no server of etcd answered"):
            Cells(hasty).post("b", 1)
        os.kill(processes[1].pid, signal.SIGCONT)
        assert store.compare_set("a", "1", "2") == b"2"
        store.close()
        hasty.close()


def test_a_store_that_never_answers_is_given_up():
    release = threading.Event()

    class Stopped(HashStore):
        def set(self, key: str, value: str) -> None:
            release.wait(30)

    store = BoundedStore(Stopped(), timeout_s=1.0, limit_s=0.05)
    for _ in range(3):
        with pytest.raises(DistNetworkError, match=r"did not answer within 0.05 s"):
            store.set("a", "1")
    with pytest.raises(StoreLostError):
        Cells(store, "tcp://somewhere").post("a", 1)
    release.set()
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(DistNetworkError):
            assert not store.check(["b"])
            break
        assert time.monotonic() < deadline


def test_a_store_that_is_gone_is_not_asked_again():
    """Clients of torch never connect again, and print half a page each time."""
    asked = []

    class Closed(HashStore):
        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            raise DistNetworkError("it closed the connection")

    store = BoundedStore(Closed(), timeout_s=1.0)
    for _ in range(3):
        with pytest.raises(DistNetworkError, match="it closed the connection"):
            store.check(["a"])
    assert asked == [["a"]]
    store.close()


@pytest.mark.parametrize("where", ["head:29600", "tcp://head", "udp://head:1", "etcd://", "etcd://a:b", "", 7])
def test_an_address_of_another_form_is_refused(where):
    with pytest.raises(ConfigurationError) as caught:
        open_store(where, 0.1)
    assert caught.value.argument == "where"


def test_nobody_who_listens_is_an_error_that_names_the_command():
    (port,) = free_ports(1)
    with pytest.raises(StoreLostError, match=f"baguarun --serve-islands 127.0.0.1:{port}"):
        open_store(f"tcp://127.0.0.1:{port}", 0.05)
    with pytest.raises(StoreLostError, match="no server answers at etcd://"):
        open_store(f"etcd://127.0.0.1:{port}", 0.0)


def test_who_listens_and_never_answers_is_given_up():
    """Torch waits for it without end."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreLostError, match="no store answers at") as caught:
            open_store(where, 0.05)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_a_served_store_is_found_at_the_address_that_it_says():
    served, where = serve_store_at("127.0.0.1", 0)
    store = open_store(where, 5.0)
    store.set("a", "1")
    store.close()
    assert served.get("a") == b"1"


@needs_etcd
@pytest.mark.threads
def test_islands_train_on_while_the_leader_of_etcd_is_killed(tmp_path):
    with cluster(3, tmp_path) as (servers, processes):
        where = "etcd://" + ",".join(f"{host}:{port}" for host, port in servers)
        killed = threading.Event()

        def island():
            store = open_store(where, 20.0)
            with joined(store, 2, deadlines=DEADLINES) as islands:
                model = wrapped(islands, "diloco")

                def pace(step):
                    if step == PERIOD + 1 and islands.seat == 0:
                        leader(servers, processes).kill()
                        killed.set()
                    if step == PERIOD + 2:
                        assert killed.wait(60)
                        if islands.seat == 1:
                            vanish(islands)

                return train(islands, model, 3 * PERIOD, pace)

        ends = run(2, island)
    rows = survivors(ends)
    assert check_rows("diloco", rows) == [(0, 1), (0,), (0,)]
