"""The name ``bagua`` without an import of it: the entry point that torch 2.14 looks for, and what it registers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import PATIENCE_S, REPOSITORY, environment, free_port
from tests.versions import TORCH, needs

pytestmark = pytest.mark.solo

MEET = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("bagua"{arguments})
dist.all_reduce(total := torch.ones(1))
assert total == dist.get_world_size(), total
assert dist.get_backend() == "bagua"
dist.destroy_process_group()
"""
ALONE = MEET.format(arguments=", store=dist.HashStore(), rank=0, world_size=1")


def ended(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, path = [sys.executable, *arguments], variables.pop("PYTHONPATH", str(REPOSITORY))
    variables = {**environment(), **variables, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=PATIENCE_S, check=False)


def test_what_is_registered_costs_little_imports_the_rest_later_and_refuses_a_string_of_backends() -> None:
    program = f"""
import torch.distributed as dist, sys
from bagua.plugin import register
register()
assert dist.is_backend_available("bagua")
assert "bagua.comm" not in sys.modules
try:
    dist.init_process_group("cpu:bagua,meta:gloo", store=dist.HashStore(), rank=0, world_size=1)
except ValueError as error:
    assert "would silently not build meta:gloo beside bagua" in str(error), error
else:
    raise AssertionError("a string of backends was taken")
{ALONE}
assert "bagua.comm" in sys.modules
import bagua.torch_api
"""
    result = ended("-c", program)
    assert result.returncode == 0, result.stderr


def test_what_is_wrong_is_said_when_a_group_is_asked_for() -> None:
    program = f"""
import sys
sys.modules["bagua.comm"] = None
from bagua.plugin import register
register()
import torch.distributed as dist
assert dist.is_backend_available("bagua")
{ALONE}
"""
    assert "import of bagua.comm halted" in ended("-c", program).stderr


@pytest.fixture
def installed(tmp_path: Path) -> str:
    """A path with what an installation says of its entry points."""
    folder = tmp_path / "bagua_torch-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: bagua-torch\nVersion: 0\n")
    found = (REPOSITORY / "pyproject.toml").read_text().partition('entry-points."torch.distributed.backends"]\n')[2]
    entry = found.partition("\n")[0].replace('"', "")
    (folder / "entry_points.txt").write_text(f"[torch.distributed.backends]\n{entry}\n")
    return f"{tmp_path}:{REPOSITORY}"


@needs("entry points of backends", TORCH >= (2, 14))
def test_torch_finds_the_name(installed: str) -> None:
    result = ended("-c", ALONE, PYTHONPATH=installed)
    assert result.returncode == 0, result.stderr


@needs("entry points of backends", TORCH >= (2, 14))
@pytest.mark.shm
def test_torch_finds_the_name_under_torchrun(installed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MEET.format(arguments=""))
    where = f"--master-port={free_port()}"
    result = ended("-m", "torch.distributed.run", "--nproc-per-node=2", where, str(script), PYTHONPATH=installed)
    assert result.returncode == 0, result.stderr
