"""Processes in network namespaces of their own, without any interface, train through a folder; one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.membership.buckets import needs_obstore

REPOSITORY = Path(__file__).parents[2]
ALONE = ("unshare", "--net", "--map-root-user")


def _cannot_part() -> bool:
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode != 0
    except OSError:
        return True


pytestmark = [needs_obstore, pytest.mark.skipif(_cannot_part(), reason="unshare makes no network namespace here")]


@pytest.fixture
def start(tmp_path):
    """Starts an island; what still runs at the end is killed."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [*ALONE, sys.executable, str(REPOSITORY / "examples/through_a_bucket.py"), f"file://{tmp_path}"]
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
        started.append(subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=variables))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_islands_without_a_network_train_as_one(start):
    islands = [start("--steps", "60") for _ in range(2)]
    lines = [island.communicate(timeout=200)[0].splitlines() for island in islands]
    assert [line.rpartition(", ")[2] for line in lines[0][:-1]] == ["2 islands"] * 3
    assert lines[0][-1] == lines[1][-1]
    assert lines[0][-1].startswith("norm of the weights")


def test_a_killed_process_costs_the_other_no_outer_step(start):
    dies, lives = (start("--steps", "160") for _ in range(2))
    while not dies.stdout.readline().startswith("step 60"):
        assert dies.poll() is None
    dies.kill()
    lines = lives.communicate(timeout=200)[0].splitlines()
    assert [line.split(":")[0] for line in lines[:-1]] == [f"step {step}" for step in range(20, 161, 20)]
    assert "2 islands" in lines[0]
    assert "1 islands" in lines[-2]
