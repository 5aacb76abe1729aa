"""``bagua islands clean``: it deletes what a run has left, nothing else, and not while an island lives."""

from __future__ import annotations

from bagua.cli.main import main
from bagua.comm import open_bucket
from bagua.membership import join_islands
from tests.membership.buckets import needs_obstore

pytestmark = needs_obstore


def test_what_a_run_has_left_is_deleted_and_nothing_else(tmp_path, capsys):
    where = f"file://{tmp_path}/run"
    with join_islands(where):
        pass
    (tmp_path / "run" / "mine.txt").write_text("kept")
    open_bucket(where, 1.0).bucket.put("objects/a/1", b"12")
    assert main(["islands", "clean", where]) == 0
    assert "Deleted " in capsys.readouterr().out
    assert [*open_bucket(where, 1.0).bucket.list()] == ["mine.txt"]


def test_a_run_that_lives_is_left_alone_unless_it_is_forced(tmp_path, capsys):
    where = f"file://{tmp_path}/run"
    with join_islands(where) as islands:
        assert main(["islands", "clean", where]) == 1
        assert f"a run is alive at {where}" in capsys.readouterr().err
        assert "process" in islands._state.record.host
        assert main(["islands", "clean", "--force", where]) == 0


def test_an_address_that_is_none_is_an_error(capsys):
    assert main(["islands", "clean", "s3://"]) == 1
    assert "bagua islands: " in capsys.readouterr().err
