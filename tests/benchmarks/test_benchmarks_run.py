"""Each benchmark runs and writes its lines; with so few rounds it does not judge."""

import json
import subprocess

import pytest

from benchmarks import collectives, compression, decentralized, import_time, outer_optimizer, training_step, watching
from tests.interpreters import interpreter

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture
def numbers_file(tmp_path):
    return tmp_path / "numbers.json"


def names(numbers_file):
    return [comparison["name"] for comparison in json.loads(numbers_file.read_text())["comparisons"]]


def test_collectives(numbers_file, monkeypatch):
    monkeypatch.setattr(collectives, "open_mpi_is_missing", lambda: "for this test")
    few = ["--rounds", "2", "--largest", "4000", "--calls", "10"]
    assert collectives.main([*few, "--json", str(numbers_file)]) == 0
    assert json.loads(numbers_file.read_text())["notes"] == {"Open MPI": "left out, for this test"}
    assert "2 ranks, 4 B: shm allreduce, calls compared : not" in names(numbers_file)
    assert [name.split(":")[0] for name in names(numbers_file)][:2] == ["2 ranks, 4 B", "2 ranks, 4 KB"]
    assert sum(name.startswith("1 rank") for name in names(numbers_file)) >= 2


def test_training_step(numbers_file, monkeypatch):
    monkeypatch.setattr(training_step, "PAIRS", [("DDP", "bagua"), ("bagua, silent", "bagua")])
    few = ["--rounds", "1", "--batches", "2", "--hidden", "8", "--no-memory"]
    assert training_step.main([*few, "--json", str(numbers_file)]) == 0
    assert len(names(numbers_file)) == 5
    assert "2 ranks, batch 2: bagua : bagua, silent" in names(numbers_file)


def test_steps_between_exchanges_and_the_outer_step(numbers_file):
    few = ["--rounds", "2", "--batches", "2", "--hidden", "8", "--backend", "shm", "--only", "diloco between exchanges"]
    assert training_step.main([*few, "--json", str(numbers_file)]) == 0
    assert names(numbers_file) == [
        "2 ranks, batch 2: diloco between exchanges : bare",
        "1 rank: outer step of diloco : copy of weights",
    ]
    limits = [one["limit"] for one in json.loads(numbers_file.read_text())["comparisons"]]
    assert limits == [1.01, 4.0]


def test_watching(numbers_file):
    few = ["--rounds", "1", "--hidden", "8", "--runs", "1", "--steps", "3", "--sizes", "2", "--backends", "shm"]
    assert watching.main([*few, "--json", str(numbers_file)]) == 0
    compared = ["DDP with bagua.watch() : without", "watched : without a record"]
    assert names(numbers_file) == [f"2 ranks, batch 16: {one}" for one in compared]
    notes = json.loads(numbers_file.read_text())["notes"]
    assert notes["2 ranks on shm: the late rank is named"].endswith("of 1")
    assert float(notes["shm: exposed, hidden and waiting time : that of the calls by a stopwatch"]) > 0.5


def test_import_time(numbers_file, monkeypatch):
    def run_python(code, _):
        subprocess.run([*interpreter(), "-c", code], check=True)

    monkeypatch.setattr(import_time, "run_python", run_python)
    assert import_time.main(["--rounds", "1", "--json", str(numbers_file)]) == 0
    assert names(numbers_file) == ["import bagua.torch_api : import torch"]


def test_compression(numbers_file):
    few = ["--rounds", "1", "--bytes", "4000", "--codec", "sign", "--codec", "topk"]
    assert compression.main([*few, "--json", str(numbers_file)]) == 0
    assert len(names(numbers_file)) == 6
    assert json.loads(numbers_file.read_text())["notes"]["sign: part of the bytes"] == 0.032


def test_decentralized(numbers_file, monkeypatch):
    monkeypatch.setattr(decentralized, "DECENT_LIMITS", {None: 0.7})
    few = ["--rounds", "1", "--hidden", "8", "--batch", "2", "--nproc", "2", "--against", "DDP"]
    assert decentralized.main([*few, "--json", str(numbers_file)]) == 0
    assert names(numbers_file) == ["2 ranks, batch 2: bagua on the default : DDP"]


def test_lightning(numbers_file, monkeypatch):
    lightning = pytest.importorskip("benchmarks.lightning", reason="needs the extra lightning")
    monkeypatch.setattr(lightning, "LIMITS", {"our wrapper by hand": 1.03})
    few = ["--rounds", "1", "--hidden", "8", "--batch", "2"]
    assert lightning.main([*few, "--json", str(numbers_file)]) == 0
    assert names(numbers_file) == ["2 ranks, batch 2: bagua : our wrapper by hand"]


def test_outer_optimizer(numbers_file, capsys):
    few = ["--ranks", "2", "--steps", "4", "--seeds", "1", "--every", "2", "--rates", "0.7", "--momenta", "0", "0.5"]
    assert outer_optimizer.main([*few, "--json", str(numbers_file)]) == 0
    numbers = json.loads(numbers_file.read_text())
    assert sorted(numbers) == ["2: 0.7, 0", "2: 0.7, 0.5", "2: guarded"]
    assert all(0.5 < ratio < 2 for ratios in numbers.values() for ratio in ratios)
    assert "H=2: the best is 0.7, 0" in capsys.readouterr().out
