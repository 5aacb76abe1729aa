"""A script that ends with an error: the other ranks, and the launcher, learn which one it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua.comm.lifetime.closing import uncaught_error
from bagua.comm.startup.default_group import WorldHolder
from tests.interpreters import interpreter

REPOSITORY = Path(__file__).parents[2]
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
    cause = said.partition("Root Cause")[2]
    assert "rank      : 1" in cause


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
