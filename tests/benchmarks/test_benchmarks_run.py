"""Each benchmark runs and writes its lines; with so few rounds it does not judge."""

import json

import pytest

from benchmarks import collectives, compression, decentralized, import_time, training_step

pytestmark = pytest.mark.gloo


@pytest.fixture
def numbers_file(tmp_path):
    return tmp_path / "numbers.json"


def names(numbers_file):
    return [comparison["name"] for comparison in json.loads(numbers_file.read_text())["comparisons"]]


def test_collectives(numbers_file):
    few = ["--rounds", "2", "--largest", "4000", "--calls", "10"]
    assert collectives.main([*few, "--json", str(numbers_file)]) == 0
    assert [name.split(":")[0] for name in names(numbers_file)][:2] == ["2 ranks, 4 B", "2 ranks, 4 KB"]
    assert sum(name.startswith("1 rank") for name in names(numbers_file)) >= 2


def test_training_step(numbers_file, monkeypatch):
    monkeypatch.setattr(training_step, "PAIRS", [("DDP", "bagua"), ("bagua, silent", "bagua")])
    few = ["--rounds", "1", "--batches", "2", "--hidden", "8", "--no-memory"]
    assert training_step.main([*few, "--json", str(numbers_file)]) == 0
    assert len(names(numbers_file)) == 5
    assert "2 ranks, batch 2: bagua : bagua, silent" in names(numbers_file)


def test_import_time(numbers_file):
    assert import_time.main(["--rounds", "1", "--json", str(numbers_file)]) == 0
    assert names(numbers_file) == ["import bagua.torch_api : import torch"]


def test_compression(numbers_file):
    few = ["--rounds", "1", "--bytes", "4000", "--codec", "sign", "--codec", "topk"]
    assert compression.main([*few, "--json", str(numbers_file)]) == 0
    assert len(names(numbers_file)) == 6
    assert json.loads(numbers_file.read_text())["notes"]["sign: part of the bytes"] == 0.034


def test_decentralized(numbers_file, monkeypatch):
    monkeypatch.setattr(decentralized, "DECENT_LIMITS", {None: 0.7})
    few = ["--rounds", "1", "--hidden", "8", "--batch", "2", "--nproc", "2", "--against", "DDP"]
    assert decentralized.main([*few, "--json", str(numbers_file)]) == 0
    assert names(numbers_file) == ["2 ranks, batch 2: bagua on the default : DDP"]
