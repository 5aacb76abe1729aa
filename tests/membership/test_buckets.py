"""Buckets as stores: claims, records, what bad ones get, and that no message tells a secret."""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore

from bagua.comm import Cells, open_store
from bagua.comm.store.bucket import ObjectBucket, bucket_of, cell_name
from bagua.errors import ConfigurationError, StoreLostError
from tests.harness import in_threads
from tests.membership.buckets import KEY, SECRET, needs_moto, needs_obstore, new_s3, opened, s3_server

pytestmark = needs_obstore


@pytest.fixture(scope="module")
def endpoint():
    with s3_server() as found:
        yield found


@pytest.fixture(params=["file", pytest.param("s3", marks=needs_moto)])
def again(request, tmp_path):
    """Opens the same bucket, as another process does."""
    if request.param == "file":
        return lambda: opened(f"file://{tmp_path}/run")
    objects = new_s3(request.getfixturevalue("endpoint"))
    return lambda: opened("s3://bucket/run", objects)


def test_a_bucket_does_what_islands_expect_of_a_store(again):
    store, other = again(), again()
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
    cells.post("record/0", 1)
    cells.post("record/0/1", 2)  # A key under another key, as ranks of an island have.
    assert cells.read(["epoch/1", "record/0", "record/0/1", "no"]) == [[1], 1, 2, None]
    assert bucket_of(part) is store.bucket


def test_of_those_who_claim_a_cell_at_once_one_wins(again):
    stores = [again() for _ in range(6)]

    def claim(number: int) -> list[bytes]:
        return [stores[number].compare_set(f"seat/{seat}", "", str(number)) for seat in range(5)]

    assert len({tuple(row) for row in in_threads(6, claim)}) == 1


@needs_moto
def test_a_server_swaps_values_and_counts(endpoint):
    store = opened("s3://bucket/run", new_s3(endpoint))
    store.compare_set("cell", "", "first")
    assert store.compare_set("cell", "first", "second") == b"second"
    assert store.compare_set("cell", "first", "third") == b"second"
    assert [store.add("count", 2), store.add("count", -1)] == [2, 1]


@pytest.mark.parametrize("name", ["a run", "../up", "ä/ö", "100%", ".", "a=20run"])
def test_any_name_of_a_run_is_a_name_of_an_object(tmp_path, name):
    store = opened(f"file://{tmp_path}/run")
    part = PrefixStore(f"islands/{name}", store)
    part.set("a", "1")
    assert part.get("a") == b"1"
    assert not {".", "%", " "} & {*cell_name(name).removesuffix(".cell")}


def test_keys_of_another_token_are_other_keys(tmp_path, monkeypatch):
    store = opened(f"file://{tmp_path}/run")
    store.set("a", "1")
    monkeypatch.setenv("BAGUA_TOKEN", "other")
    assert not store.check(["a"])


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


def test_who_waits_asks_less_and_less_often(again):
    bucket = again().bucket
    pauses = list(itertools.islice(bucket.pauses(), 30))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.002 if bucket.is_folder else 0.05, 2.0)


def test_a_store_that_takes_every_claim_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ObjectBucket, "create", lambda *_: True)
    with pytest.raises(ConfigurationError, match="no conditional put") as caught:
        open_store(f"file://{tmp_path}/run", 1.0)
    assert caught.value.argument == "where"


@pytest.mark.parametrize("where", [f"s3://{KEY}:{SECRET}@bucket/run", f"s3://bucket/run?secret={SECRET}", "s3://"])
def test_an_address_with_a_secret_is_refused_without_telling_it(where):
    with pytest.raises(ConfigurationError) as caught:
        open_store(where, 0.1)
    assert SECRET not in str(caught.value)
    assert KEY not in str(caught.value)


def _whole(error: BaseException) -> str:
    parts = []
    found: BaseException | None = error
    while found is not None:
        parts.append(repr(found) + str(found))
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return "".join(parts)


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


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((StoreLostError, ConfigurationError), match=f"{tmp_path}/file/run"):
        open_store(f"file://{tmp_path}/file/run", 0.1)


def test_a_request_that_fails_is_an_error_of_the_store(tmp_path):
    store = opened(f"file://{tmp_path}/run")

    def fail(kind: str, name: str, moment: str) -> None:
        raise DistNetworkError("nobody is there")

    store.bucket.hook = fail
    with pytest.raises(StoreLostError, match="nobody is there"):
        Cells(store).post("a", 1)
