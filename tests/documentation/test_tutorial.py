"""The tutorial's script learns on two processes at least what its origin learns on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.architecture.source_tree import REPOSITORY

pytestmark = pytest.mark.shm


def accuracies(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^accuracy (\d\.\d{3})$", done.stdout, re.MULTILINE)


def test_two_processes_learn_at_least_as_much_as_one():
    (one,) = accuracies("examples/spiral_one_process.py")
    (two,) = accuracies("-m", "bagua.cli.baguarun", "--nproc", "2", "examples/spiral.py")
    assert float(two) >= float(one) > 0.9
