"""Functions of a notebook on several processes."""

from __future__ import annotations

import builtins
import sys

import pytest

import bagua
from bagua.cli.notebook import notebook_launch
from bagua.errors import ConfigurationError

CELL = """
class Result:
    def __init__(self, ranks):
        self.ranks = ranks

def train(factor):
    import sys, warnings
    import torch
    import bagua

    bagua.init_process_group()
    rank = bagua.get_rank()
    print("hello from rank", rank, end="")
    print("trouble on rank", rank, file=sys.stderr)
    total = torch.tensor([float(rank + 1)]) * factor
    bagua.allreduce(total)
    bagua.destroy_process_group()
    return Result((rank, bagua.get_local_rank() if bagua.is_initialized() else rank, total.item(), offset))

def fail():
    import bagua

    bagua.init_process_group()
    if bagua.get_rank() == 1:
        raise ValueError("a mistake in the cell")
    bagua.barrier()

offset = 5
"""


@pytest.fixture
def cell() -> dict[str, object]:
    """What cells have defined: functions that no module has."""
    names: dict[str, object] = {"__name__": "__main__"}
    exec(CELL, names)
    return names


@pytest.mark.shm
def test_a_function_of_a_cell_runs_on_each_rank(cell, capfd):
    results = notebook_launch(cell["train"], 10, ranks=2)
    assert [result.ranks for result in results] == [(0, 0, 30.0, 5), (1, 1, 30.0, 5)]
    shown = capfd.readouterr()
    assert "hello from rank 0" in shown.out
    assert "hello from rank 1" not in shown.out
    assert all(f"trouble on rank {rank}" in shown.err for rank in range(2))


@pytest.mark.shm
def test_an_error_of_a_cell_reaches_the_notebook_with_its_rank(cell):
    with pytest.raises(ValueError, match="a mistake in the cell") as failed:
        notebook_launch(cell["fail"], ranks=2)
    if sys.version_info >= (3, 11):
        (note,) = failed.value.__notes__
        assert "rank 1 failed" in note
        assert "rank 0: PeerLostError: lost rank 1" in note


def test_what_cannot_be_copied_is_refused(tmp_path):
    with (tmp_path / "file").open("w") as file, pytest.raises(ConfigurationError, match="inside the function"):
        notebook_launch(lambda: file, ranks=2)
    with pytest.raises(ConfigurationError, match="ranks"):
        notebook_launch(lambda: 0, ranks=0)


def test_without_cloudpickle_the_extra_is_named(monkeypatch):
    known = builtins.__import__

    def refuse(name, *arguments, **options):
        if name == "cloudpickle":
            raise ImportError(name)
        return known(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigurationError, match="notebook"):
        bagua.notebook_launch(print)
