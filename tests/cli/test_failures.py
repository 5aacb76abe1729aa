"""The summary of a failed run names the cause first, and ``explain`` says it again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua.cli import baguarun, explain


def failure(exitcode: int = 1, timestamp: int = 100, error: str = "", culprit: int | None = None) -> SimpleNamespace:
    facts = {"py_callstack": f"whole {error}", "own": f"own {error}", "culprit": culprit, "timestamp": timestamp}
    message = {"message": error, "extraInfo": facts} if error else "Signal 9"
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, message=message)


LOST = "PeerLostError: lost rank 2"
CAUSES = {
    "an error of its own, though seen last": (
        {0: failure(error=LOST, culprit=2), 2: failure(timestamp=109, error="ValueError: no", culprit=2)},
        2,
    ),
    "the first of two errors": (
        {0: failure(timestamp=3, error="A", culprit=0), 1: failure(timestamp=2, error="B", culprit=1)},
        1,
    ),
    "a death, not who lost a peer": ({0: failure(timestamp=1, error=LOST, culprit=2), 2: failure(-9, 5)}, 2),
    "a death, not whom the launcher ended": ({0: failure(-15, 1), 1: failure(-9, 2)}, 1),
    "who lost a peer of another host": ({0: failure(error=LOST, culprit=7), 1: failure(-15)}, 0),
}


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_comes_first(case, tmp_path):
    failed, cause = CAUSES[case]
    lines = baguarun.summary(failed, str(tmp_path)).splitlines()
    assert lines[0].startswith(f"baguarun: rank {cause} ")
    assert [line for line in lines if line.startswith("rank ")] == [
        line for line in lines if line.startswith(tuple(f"rank {rank} " for rank in failed if rank != cause))
    ]


def test_the_summary_is_short_and_explain_says_it_again(tmp_path, capsys):
    failed = {rank: failure(error=f"PeerLostError: lost rank 30, says {rank}", culprit=30) for rank in range(30)}
    said = baguarun.summary({**failed, 30: failure(-signal.SIGKILL)}, str(tmp_path))
    assert said.splitlines()[0] == "baguarun: rank 30 was killed by SIGKILL"
    assert "and 14 other ranks" in said
    assert len(said.splitlines()) == 19
    assert (tmp_path / "traceback_7.txt").read_text() == "whole PeerLostError: lost rank 30, says 7"
    assert explain.main([str(tmp_path)]) == 0
    assert said in capsys.readouterr().out


def test_folders_of_runs_go_when_empty_or_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr(baguarun.tempfile, "tempdir", str(tmp_path))
    old, young = tmp_path / "bagua-run-old", tmp_path / "bagua-run-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "summary.txt").write_text("x")
    os.utime(old, (1, 1))
    with baguarun.flight_folder() as empty:
        assert Path(empty).stat().st_mode & 0o777 == 0o700
    with baguarun.flight_folder() as full:
        (Path(full) / "summary.txt").write_text("x")
    assert sorted(tmp_path.iterdir()) == sorted([young, Path(full)])
