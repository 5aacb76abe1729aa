"""The example of the page about Lightning, run as a user would run it: Lightning starts the second process."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import interpreter

pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

pytestmark = pytest.mark.gloo

REPOSITORY = Path(__file__).parents[2]


def test_the_example_learns_and_saves(imported_before, tmp_path):
    script = ["examples/use_lightning.py", "--algorithm", "diloco", "--checkpoint", str(tmp_path)]
    done = subprocess.run(
        [*interpreter(*imported_before), *script, "--epochs", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"epoch \d+  loss (\S+)", done.stdout)]
    assert losses[-1] < 0.5 * losses[0]  # The first is that of the untrained model.
    (first, *one), (second, *other) = sorted(re.findall(r"rank (\d) of (\d) ends with (-?\d+\.\d+)", done.stdout))
    assert (first, second, one) == ("0", "1", other)
    assert (tmp_path / "last.ckpt").exists()
