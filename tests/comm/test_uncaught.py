"""A script that ends with an error: the other ranks, and the launcher, learn which one it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bagua.comm.lifetime.closing import own_traceback, report_uncaught, uncaught_error
from bagua.comm.startup.default_group import WorldHolder
from bagua.errors import PeerLostError
from tests.interpreters import interpreter
from tests.launching import REPOSITORY

SCRIPT = """
import sys, torch, bagua.comm as comm
comm.init_process_group(backend=sys.argv[1], timeout=20)
tensor = torch.ones(3)
comm.allreduce(tensor)
if comm.get_rank() == 1:
    {end}
comm.allreduce(tensor)
"""


def run(tmp_path: Path, backend: str, end: str) -> str:
    """What the launcher and the ranks write."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    done = subprocess.run(
        [*interpreter(), "-m", "bagua.cli.baguarun", "--nproc", "2", str(script), backend],
        capture_output=True, text=True, timeout=100, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    return done.stderr


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize(
    "backend", [pytest.param("shm", marks=pytest.mark.shm), pytest.param("gloo", marks=pytest.mark.gloo)]
)
def test_the_error_of_a_rank_reaches_the_others_and_the_launcher_names_it(tmp_path: Path, backend: str) -> None:
    said = run(tmp_path, backend, "raise RuntimeError('my own bug')")
    assert "PeerLostError: lost rank 1: it left its script with RuntimeError: my own bug" in said
    assert "RuntimeError: my own bug" in said
    assert "site-packages" not in said
    summary = said.partition("baguarun: ")[2]
    assert summary.startswith("rank 1 failed: RuntimeError: my own bug\n  Traceback")
    assert "rank 0 failed: PeerLostError: lost rank 1" in summary
    folder = summary.split()[-1]
    assert "site-packages" not in Path(folder, "summary.txt").read_text()
    assert "PeerLostError" in Path(folder, "traceback_0.txt").read_text()
    assert len(list(Path(folder).glob("*/calls_0.json"))) == 1
    shutil.rmtree(folder)


@pytest.mark.shm
@pytest.mark.usefixtures("forked_python")
def test_a_rank_that_ends_in_order_has_closed_its_communicator(tmp_path: Path) -> None:
    assert "lost rank 1: it closed its communicator" in run(tmp_path, "shm", "sys.exit(0)")


def test_an_old_error_at_a_prompt_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("a slip of the user")
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    assert uncaught_error() is error
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert uncaught_error() is None


def test_a_world_is_closed_although_its_error_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(_: BaseException | None) -> None:
        raise TypeError("an error whose text cannot be made")

    closed: list[bool] = []
    holder = WorldHolder()
    world = SimpleNamespace(process=os.getpid(), abort=abort, close=lambda: closed.append(True))
    monkeypatch.setattr(holder, "process_world", world)
    with pytest.raises(TypeError):
        holder._close_at_exit()
    assert closed == [True]


def _raised_inside_torch() -> Exception:
    try:
        torch.utils.data.default_collate([object()])
    except TypeError as raised:
        return raised
    raise AssertionError("torch takes it")


def test_a_traceback_holds_the_users_frames_alone() -> None:
    told = own_traceback(_raised_inside_torch())
    assert "test_uncaught.py" in told
    assert "TypeError: default_collate" in told
    assert "site-packages/torch" not in told
    error = PeerLostError.of(1, "it died")
    told = own_traceback(error)
    assert told == f"PeerLostError: {str(error).partition(chr(10))[0]}\n"


def test_an_error_that_cannot_be_handed_over_is_printed_as_usual(tmp_path: Path, monkeypatch, capsys) -> None:
    usual: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: usual.append(arguments))
    report_uncaught(3, str(tmp_path / "no folder" / "error.json"))
    error = ValueError("mine")
    sys.excepthook(ValueError, error, None)
    assert usual == [(ValueError, error, None)]
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    report_uncaught(3, str(tmp_path / "error.json"))
    sys.excepthook(ValueError, error, None)
    assert len(usual) == 1
    assert capsys.readouterr().err == "[rank3]: ValueError: mine\n"
    facts = json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]
    assert (facts["culprit"], facts["rank"]) == (3, 3)


def test_a_hook_of_the_program_shows_its_errors(tmp_path: Path, monkeypatch, capsys) -> None:
    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *arguments: shown.append(arguments))
    report_uncaught(0, str(tmp_path / "error.json"))
    error = ValueError("mine")
    sys.excepthook(ValueError, error, None)
    assert (shown, capsys.readouterr().err) == ([(ValueError, error, None)], "")
    assert "ValueError: mine" in (tmp_path / "error.json").read_text()
