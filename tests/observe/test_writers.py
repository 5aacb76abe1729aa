"""Writers of metrics: what is in their files, and what they say when their library is missing."""

from __future__ import annotations

import csv
import errno
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from bagua.errors import ConfigurationError
from bagua.observe import CsvWriter, MetricWriter, PrometheusWriter, TensorBoardWriter, WandbWriter, writers

VALUES = {"comm/overlap": 0.5, "comm/wait_on_rank/3": 1.25}


def test_csv_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "metrics.csv"
    for step in (1, 2):
        writer: MetricWriter = CsvWriter(path)
        writer.write(step, VALUES)
        writer.close()
        writer.close()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [(row["step"], row["name"], float(row["value"])) for row in rows] == [
        (step, name, value) for step in ("1", "2") for name, value in VALUES.items()
    ]


@pytest.mark.parametrize("cut", ["", "st", "step,name,value\n1,comm/calls,5\n2,comm/calls,12"])
@pytest.mark.parametrize("tail_bytes", [4096, 3])
def test_half_a_row_of_a_process_that_was_killed_is_dropped(tmp_path, monkeypatch, cut, tail_bytes):
    monkeypatch.setattr(writers, "_TAIL_BYTES", tail_bytes)
    path = tmp_path / "metrics.csv"
    path.write_text(cut)
    writer = CsvWriter(path)
    writer.write(3, {"comm/calls": 7})
    writer.close()
    kept = ["1,comm/calls,5"] if "calls" in cut else []
    assert path.read_text().splitlines() == ["step,name,value", *kept, "3,comm/calls,7"]


def test_prometheus_leaves_no_draft_on_a_full_disk(tmp_path, monkeypatch):
    def full(draft, *_: object, **__: object) -> None:
        draft.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        PrometheusWriter(tmp_path / "bagua.prom", rank=0).write(1, VALUES)
    assert list(tmp_path.iterdir()) == []


def test_prometheus_has_the_latest_values_only(tmp_path):
    path = tmp_path / "bagua.prom"
    writer: MetricWriter = PrometheusWriter(path, rank=2)
    writer.write(1, {"comm/overlap": 0.1})
    writer.write(2, VALUES)
    writer.close()
    assert path.read_text().splitlines() == [
        'bagua_step{rank="2"} 2',
        'bagua_comm_overlap{rank="2"} 0.5',
        'bagua_comm_wait_on_rank{rank="2",of="3"} 1.25',
    ]
    assert [one.name for one in tmp_path.iterdir()] == ["bagua.prom"]


class Run:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def test_weights_and_biases_gets_values_and_step():
    run = Run()
    writer: MetricWriter = WandbWriter(run)
    writer.write(7, VALUES)
    writer.close()
    assert run.logged == [{**VALUES, "comm/step": 7}]


def test_a_run_that_was_not_started_is_a_typed_error(monkeypatch):
    module = types.ModuleType("wandb")
    module.run = None
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigurationError, match=r"wandb\.init\(\)"):
        WandbWriter()


def test_what_is_not_installed_is_named_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match=r"bagua-torch\[wandb\]"):
        WandbWriter()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"bagua-torch\[tensorboard\]"):
        TensorBoardWriter(tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_gets_a_file(tmp_path):
    writer: MetricWriter = TensorBoardWriter(tmp_path)
    writer.write(1, VALUES)
    writer.close()
    assert [one.stat().st_size > 0 for one in tmp_path.iterdir()] == [True]
