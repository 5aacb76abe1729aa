"""What ``join_islands``, ``baguarun --serve-islands`` and ``bagua islands clean`` take and refuse.

The last one deletes what a run has left, nothing else, and not while an island lives.
"""

from __future__ import annotations

import io
import signal
import socket

import pytest

import bagua.torch_api as bagua
from bagua.cli.baguarun import main as baguarun
from bagua.cli.main import main
from bagua.comm import close_store, open_bucket, open_store, serve_store_at
from bagua.errors import CollectiveMismatchError, ConfigurationError
from tests.membership.buckets import needs_obstore


def test_the_address_comes_from_the_environment(monkeypatch, where):
    monkeypatch.setenv("BAGUA_ISLANDS", where)
    with bagua.join_islands() as first, bagua.join_islands() as second:
        assert (first.seat, second.seat, first.name) == (0, 1, "default")
        assert first.members().in_epoch == ()
        with pytest.raises(CollectiveMismatchError):
            bagua.join_islands(minimum=2)


def test_no_address_is_refused(monkeypatch):
    monkeypatch.delenv("BAGUA_ISLANDS", raising=False)
    with pytest.raises(ConfigurationError, match="no store where islands meet"):
        bagua.join_islands()


@pytest.mark.parametrize(
    ("argument", "value"),
    [("size", 0), ("size", 2.0), ("minimum", 0), ("minimum", "1"), ("name", 3), ("timeout", 0), ("timeout", "1")],
)
def test_bad_arguments_are_refused_before_anybody_is_asked(argument, value):
    with pytest.raises(ConfigurationError) as caught:
        bagua.join_islands("tcp://127.0.0.1:1", **{argument: value})
    assert caught.value.argument == argument


def test_fewer_cannot_begin_than_may_go_on():
    with pytest.raises(ConfigurationError, match="at most size, which is 2"):
        bagua.join_islands("tcp://127.0.0.1:1", size=2, minimum=3)


@pytest.mark.parametrize("address", ["29600", "head:", "127.0.0.1:x", "127.0.0.1:65536"])
def test_a_store_is_not_served_at_something_else_than_an_address(address, capsys):
    assert baguarun(["--serve-islands", address]) == 2
    assert f"not {address}" in capsys.readouterr().err


def test_a_script_beside_the_store_is_refused(capsys):
    assert baguarun(["--serve-islands=127.0.0.1:0", "train.py"]) == 2
    assert "takes host:port" in capsys.readouterr().err


def test_a_store_can_be_ended_from_when_its_address_is_known(monkeypatch):
    """Who reads the address may send a signal at once."""

    class Reader(io.StringIO):
        def flush(self):
            assert "Islands meet at tcp://127.0.0.1:" in self.getvalue()
            assert signal.getsignal(signal.SIGTERM) is not before  # It would end this process.
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("sys.stdout", Reader())
    assert baguarun(["--serve-islands=127.0.0.1:0"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_address_of_ipv6_is_printed_as_it_is_read():
    store, where = serve_store_at("::1", 0)
    assert where.startswith("tcp://[::1]:")
    store.set("served", "here")
    reached = open_store(where, 60.0)
    assert reached.get("served") == b"here"
    close_store(reached)
    del store


def test_a_store_is_not_served_where_another_one_is(capsys, where):
    assert baguarun([f"--serve-islands={where.removeprefix('tcp://')}"]) == 1
    assert "no store can be served there" in capsys.readouterr().err


@needs_obstore
def test_what_a_run_has_left_is_deleted_and_nothing_else(tmp_path, capsys):
    where = f"file://{tmp_path}/run"
    with bagua.join_islands(where):
        pass
    (tmp_path / "run" / "mine.txt").write_text("kept")
    open_bucket(where, 1.0).bucket.put("objects/a/1", b"12")
    assert main(["islands", "clean", where]) == 0
    assert "Deleted " in capsys.readouterr().out
    assert [*open_bucket(where, 1.0).bucket.list()] == ["mine.txt"]


@needs_obstore
def test_a_run_that_lives_is_left_alone_unless_it_is_forced(tmp_path, capsys):
    where = f"file://{tmp_path}/run"
    with bagua.join_islands(where) as islands:
        assert main(["islands", "clean", where]) == 1
        assert f"a run is alive at {where}" in capsys.readouterr().err
        assert "process" in islands._state.record.host
        assert main(["islands", "clean", "--force", where]) == 0


@needs_obstore
def test_an_address_that_is_none_is_an_error(capsys):
    assert main(["islands", "clean", "s3://"]) == 1
    assert "bagua islands: " in capsys.readouterr().err
