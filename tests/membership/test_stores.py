"""Stores where islands meet: those of torch under a bound, etcd, and buckets."""

import contextlib
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from unittest.mock import Mock, call

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store

from bagua.algorithms import Algorithm
from bagua.comm import Cells, group_of_seats, open_store
from bagua.comm.store.bucket import ObjectBucket, bucket_of, cell_name
from bagua.comm.store.keys import BoundedStore, PolledStore
from bagua.comm.store.serving import EtcdStore
from bagua.errors import ConfigurationError, StoreLostError
from bagua.membership import join_islands
from bagua.membership.state import Deadlines
from bagua.parallel import with_bagua
from tests.harness import descend, in_threads, stop_process, until
from tests.launching import free_port
from tests.membership import servers as local
from tests.membership.servers import KEY, SECRET, cluster, needs_etcd, needs_moto, needs_obstore, opened
from tests.membership.training import PERIOD, check_rows, filled, joined, run, survivors, train, vanish, wrapped

#: Each island has a store of its own here, so that silence is a matter of time.
DEADLINES = Deadlines(beat_s=0.05, silence_s=8.0, suspect_s=2.0, meet_s=60.0, poll_s=0.01)


def address_of(servers: list[tuple[str, int]]) -> str:
    return "etcd://" + ",".join(f"{host}:{port}" for host, port in servers)


@pytest.fixture(params=["bounded", pytest.param("etcd", marks=needs_etcd)])
def store(request, tmp_path) -> Iterator[PolledStore]:
    with cluster(1, tmp_path) if request.param == "etcd" else contextlib.nullcontext(([], [])) as (servers, _):
        found = open_store(address_of(servers), 20.0) if servers else BoundedStore(HashStore(), timeout_s=5.0)
        yield found
        found.close()


def check_store(store: Store, other: Store) -> PrefixStore:
    """A store, of which ``other`` is another view, does what torch and islands expect; a part of it."""
    part = PrefixStore("part", store)
    part.set("a", "1")
    assert (part.get("a"), other.get("part/a"), part.check(["a"]), part.check(["a", "b"])) == (b"1", b"1", True, False)
    assert part.compare_set("cell", "", "first") == b"first"
    assert other.compare_set("part/cell", "", "second") == b"first"
    part.multi_set(["x", "y"], ["7", "8"])
    assert part.multi_get(["x", "y"]) == [b"7", b"8"]
    assert (part.delete_key("a"), part.delete_key("a"), part.check(["a"])) == (True, False, False)
    store.set("bytes", b"\xff\x00")
    assert store.get("bytes") == b"\xff\x00"
    threading.Timer(0.05, lambda: other.set("part/late", "here")).start()
    assert part.get("late") == b"here"
    with pytest.raises(DistStoreError, match="wait timeout after 20ms"):
        store.wait(["never"], timedelta(seconds=0.02))
    cells = Cells(part)
    assert (cells.claim("epoch/1", [1]), cells.claim("epoch/1", [2])) == ([1], [1])
    assert cells.read(["epoch/1", "no"]) == [[1], None]
    return part


def test_a_store_does_what_torch_expects_of_one(store):
    part = check_store(store, store)
    assert part.compare_set("cell", "first", "third") == b"third"
    assert [part.add("count", 2), part.add("count", -1)] == [2, 1]
    part.append("x", "9")
    assert part.get("x") == b"79"


@pytest.mark.gloo
def test_groups_of_gloo_meet_over_such_a_store(store):
    options = {"backend": "gloo", "timeout_s": 10.0, "meet_s": 10.0}
    groups = in_threads(2, lambda number: group_of_seats(store, [3, 8], (3, 8)[number], "epoch1", **options))
    assert [group.ranks for group in groups] == [(3, 8)] * 2
    for group in groups:
        group.close()


@needs_etcd
def test_a_cluster_survives_the_loss_of_any_server(tmp_path):
    with cluster(3, tmp_path) as (servers, processes):
        store = open_store(address_of(servers), timeout_s=20.0)
        store.set("a", "1")
        processes[0].kill()  # The one that is asked first; it may be the leader.
        assert store.get("a") == b"1"
        stop_process(processes[1].pid)  # No majority is left.
        hasty = EtcdStore(servers, timeout_s=1.0, limit_s=0.2)
        with pytest.raises(StoreLostError, match="no server of etcd answered"):
            Cells(hasty).post("b", 1)
        os.kill(processes[1].pid, signal.SIGCONT)
        assert store.compare_set("a", "1", "2") == b"2"
        store.close()
        hasty.close()


def test_a_store_that_never_answers_is_given_up():
    release = threading.Event()
    stopped = Mock(HashStore, set=lambda *_: release.wait(30), check=lambda keys: False)
    store = BoundedStore(stopped, timeout_s=1.0, limit_s=0.05)
    for _ in range(3):
        with pytest.raises(DistNetworkError, match=r"did not answer within 0.05 s"):
            store.set("a", "1")
    with pytest.raises(StoreLostError):
        Cells(store, "tcp://somewhere").post("a", 1)
    release.set()

    def is_back():
        with contextlib.suppress(DistNetworkError):
            return store.check(["b"]) is False

    until(is_back)


def test_a_store_that_is_gone_is_not_asked_again():
    """Clients of torch never connect again, and print half a page each time."""
    closed = Mock(HashStore, check=Mock(side_effect=DistNetworkError("it closed the connection")))
    store = BoundedStore(closed, timeout_s=1.0)
    for _ in range(3):
        with pytest.raises(DistNetworkError, match="it closed the connection"):
            store.check(["a"])
    assert closed.check.mock_calls == [call(["a"])]
    store.close()


@pytest.mark.parametrize("where", ["head:29600", "tcp://head", "udp://head:1", "etcd://", "etcd://a:b", "", 7])
def test_an_address_of_another_form_is_refused(where):
    with pytest.raises(ConfigurationError, check=lambda error: error.argument == "where"):
        open_store(where, 0.1)


def test_nobody_who_listens_is_an_error_that_names_the_command():
    port = free_port()
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


@needs_etcd
@pytest.mark.threads
def test_islands_train_on_while_the_leader_of_etcd_is_killed(tmp_path):
    with cluster(3, tmp_path) as (servers, processes):
        killed = threading.Event()

        def island():
            with joined(open_store(address_of(servers), 20.0), 2, deadlines=DEADLINES) as islands:

                def pace(step):
                    if step == PERIOD + 1 and islands.seat == 0:
                        local.leader(servers, processes).kill()
                        killed.set()
                    if step == PERIOD + 2:
                        assert killed.wait(60)
                        if islands.seat == 1:
                            vanish(islands)

                return train(islands, wrapped(islands, "diloco"), 3 * PERIOD, pace)

        ends = run(2, island)
    assert check_rows("diloco", survivors(ends)) == [(0, 1), (0,), (0,)]


@pytest.fixture(scope="module")
def endpoint():
    with local.s3_server() as found:
        yield found


@pytest.fixture(params=["file", pytest.param("s3", marks=needs_moto)])
def again(request, tmp_path):
    """Opens the same bucket, as another process does."""
    if request.param == "file":
        return lambda: opened(f"file://{tmp_path}/run")
    objects = local.new_s3(request.getfixturevalue("endpoint"))
    return lambda: opened("s3://bucket/run", objects)


@needs_obstore
def test_a_bucket_does_what_islands_expect_of_a_store(again):
    store = again()
    part = check_store(store, again())
    cells = Cells(part)
    cells.post("record/0", 1)
    cells.post("record/0/1", 2)  # A key under another key, as ranks of an island have.
    assert cells.read(["record/0", "record/0/1"]) == [1, 2]
    assert bucket_of(part) is store.bucket


FORMS = {
    "plain": {},
    "streaming": {"fragments": 4, "overlap": 1, "mix": "add", "codec": "int4", "error_feedback": True},
}


def weights_after_five_outer_steps(islands, options):
    """All weights, and the seat. No two islands begin with the same ones."""
    sizes = [(3, 8), (8, 8), (8, 8), (8, 1)]
    model = filled(torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes)), islands.seat, 1 / 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with_bagua(model, optimizer, Algorithm.init("diloco", sync_every=8, **options), between=islands)
    generator = torch.Generator().manual_seed(100 + islands.seat)
    for _ in range(5 * 8 + 1):
        data = torch.randn(4, 3, generator=generator)
        descend(optimizer, (model(data) - data.sum(1, keepdim=True)).square().mean())
    assert all(one.isfinite().all() for one in model.parameters())
    return islands.seat, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@needs_obstore
@pytest.mark.gloo
@pytest.mark.parametrize(("size", "form"), [(2, "plain"), (2, "streaming"), (3, "streaming"), (5, "streaming")])
def test_a_schedule_gives_the_same_bits_over_file_and_over_tcp(tmp_path, where, size, form):
    def over(place):
        def job():
            with join_islands(place, size, timeout=60) as islands:
                return weights_after_five_outer_steps(islands, FORMS[form])

        ends = run(size, job)
        assert not [end for end in ends if isinstance(end, BaseException)], ends
        return dict(ends)

    ours, theirs = over(f"file://{tmp_path}/run"), over(where)
    assert all(torch.equal(ours[seat], theirs[seat]) for seat in ours)


@needs_obstore
def test_of_those_who_claim_a_cell_at_once_one_wins(again):
    stores = [again() for _ in range(6)]

    def claim(number: int) -> tuple[bytes, ...]:
        return tuple(stores[number].compare_set(f"seat/{seat}", "", str(number)) for seat in range(5))

    assert len({*in_threads(6, claim)}) == 1


@needs_obstore
@needs_moto
def test_a_server_swaps_values_and_counts(endpoint):
    store = opened("s3://bucket/run", local.new_s3(endpoint))
    store.compare_set("cell", "", "first")
    assert store.compare_set("cell", "first", "second") == b"second"
    assert store.compare_set("cell", "first", "third") == b"second"
    assert [store.add("count", 2), store.add("count", -1)] == [2, 1]


@needs_obstore
@pytest.mark.parametrize("name", ["a run", "../up", "ä/ö", "100%", ".", "a=20run"])
def test_any_name_of_a_run_is_a_name_of_an_object(tmp_path, name):
    store = opened(f"file://{tmp_path}/run")
    part = PrefixStore(f"islands/{name}", store)
    part.set("a", "1")
    assert part.get("a") == b"1"
    assert not {".", "%", " "} & {*cell_name(name).removesuffix(".cell")}


@needs_obstore
def test_keys_of_another_token_are_other_keys(tmp_path, monkeypatch):
    store = opened(f"file://{tmp_path}/run")
    store.set("a", "1")
    monkeypatch.setenv("BAGUA_TOKEN", "other")
    assert not store.check(["a"])


@needs_obstore
def test_objects_are_counted_listed_and_deleted(again):
    bucket = again().bucket
    before = bucket.requests
    bucket.put("objects/a", b"12345678")
    part = bucket.get_part("objects/a", 2, 3)
    assert (part is not None and bytes(part), bucket.get_part("objects/b", 0, 1)) == (b"345", None)
    assert [size for size, _ in bucket.list("objects").values()] == [8]
    assert bucket.requests == before + 4
    bucket.delete(["objects/b", "objects/a"])
    assert bucket.list("objects") == {}


@needs_obstore
def test_who_waits_asks_less_and_less_often(again):
    bucket = again().bucket
    pauses = list(itertools.islice(bucket.pauses(), 30))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.002 if bucket.is_folder else 0.05, 2.0)


@needs_obstore
def test_a_store_that_takes_every_claim_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ObjectBucket, "create", lambda *_: True)
    with pytest.raises(ConfigurationError, match="no conditional put", check=lambda error: error.argument == "where"):
        open_store(f"file://{tmp_path}/run", 1.0)


@needs_obstore
@pytest.mark.parametrize("where", [f"s3://{KEY}:{SECRET}@bucket/run", f"s3://bucket/run?secret={SECRET}", "s3://"])
def test_an_address_with_a_secret_is_refused_without_telling_it(where):
    with pytest.raises(ConfigurationError) as caught:
        open_store(where, 0.1)
    assert SECRET not in str(caught.value)
    assert KEY not in str(caught.value)


def _whole(error: BaseException | None) -> str:
    if error is None:
        return ""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return repr(error) + str(error) + _whole(before)


@needs_obstore
@needs_moto
def test_what_a_server_refuses_is_an_error_with_the_address_and_no_secret(endpoint):
    from obstore.store import S3Store

    given = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
    missing = S3Store("no-such-bucket", endpoint=endpoint, client_options={"allow_http": True}, **given)
    with pytest.raises(StoreLostError, match="s3://no-such-bucket/run: there is no such bucket") as caught:
        open_store("s3://no-such-bucket/run", 0.1, missing)
    nobody = S3Store(
        "bucket", endpoint="http://127.0.0.1:9", client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)}, **given,
    )  # fmt: skip
    with pytest.raises(StoreLostError, match="the request failed") as other:
        open_store("s3://bucket/run", 0.1, nobody)
    for error in (caught.value, other.value):
        assert "Check its name" in error.advice
        assert not {word for word in (KEY, SECRET) if word in _whole(error)}


@needs_obstore
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((StoreLostError, ConfigurationError), match=f"{tmp_path}/file/run"):
        open_store(f"file://{tmp_path}/file/run", 0.1)
