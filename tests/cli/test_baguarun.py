"""baguarun starts scripts as torchrun does and passes their failure on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bagua.cli.baguarun", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},  # the script lies elsewhere than the package
        check=False,
    )


def test_the_example_learns_on_two_processes():
    done = run("--nproc_per_node", "2", "examples/train.py", "--steps", "41")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 3  # rank 0 alone prints, at steps 0, 20 and 40
    assert losses[-1] < 0.8 * losses[0]


def test_a_failed_script_is_an_exit_status_and_names_the_rank(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)\n")
    done = run("--nproc-per-node", "2", "--max-restarts", "0", str(script))
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr
    assert "rank      : 1" in done.stderr
