"""Each benchmark runs and writes its lines; with so few rounds it does not judge."""

import json
import subprocess

import pytest

from benchmarks import collectives, compression, decentralized, import_time, outer_optimizer, training_step, watching
from tests.interpreters import interpreter

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("forked_ranks")]


@pytest.fixture
def run(tmp_path):
    """Runs a benchmark with these words. Returns the names of what it compares, and all that it writes."""

    def run(benchmark, words, *more):
        file = tmp_path / "numbers.json"
        assert benchmark.main([*words.split(), *more, "--json", str(file)]) == 0
        numbers = json.loads(file.read_text())
        return [comparison["name"] for comparison in numbers.get("comparisons", ())], numbers

    return run


def test_collectives(run, monkeypatch):
    monkeypatch.setattr(collectives, "open_mpi_is_missing", lambda: "for this test")
    names, numbers = run(collectives, "--rounds 2 --largest 4000 --calls 10")
    assert numbers["notes"] == {"Open MPI": "left out, for this test"}
    assert "2 ranks, 4 B: shm allreduce, calls compared : not" in names
    assert [name.split(":")[0] for name in names][:2] == ["2 ranks, 4 B", "2 ranks, 4 KB"]
    assert sum(name.startswith("1 rank") for name in names) >= 2


def test_training_step(run, monkeypatch):
    monkeypatch.setattr(training_step, "PAIRS", [("DDP", "bagua"), ("bagua, silent", "bagua")])
    names, _ = run(training_step, "--rounds 1 --batches 2 --hidden 8 --no-memory")
    assert len(names) == 5
    assert "2 ranks, batch 2: bagua : bagua, silent" in names


def test_steps_between_exchanges_and_the_outer_step(run):
    words = "--rounds 2 --batches 2 --hidden 8 --backend shm --only"
    names, numbers = run(training_step, words, "diloco between exchanges")
    between = "2 ranks, batch 2: diloco between exchanges : bare"
    assert names == [between, "1 rank: outer step of diloco : copy of weights"]
    assert [one["limit"] for one in numbers["comparisons"]] == [1.01, 4.0]


def test_watching(run):
    names, numbers = run(watching, "--rounds 1 --hidden 8 --runs 1 --steps 3 --sizes 2 --backends shm")
    compared = ["DDP with bagua.watch() : without", "watched : without a record"]
    assert names == [f"2 ranks, batch 16: {one}" for one in compared]
    notes = numbers["notes"]
    assert notes["2 ranks on shm: the late rank is named"].endswith("of 1")
    assert float(notes["shm: exposed, hidden and waiting time : that of the calls by a stopwatch"]) > 0.5


def test_import_time(run, monkeypatch):
    def run_python(code, _):
        subprocess.run([*interpreter(), "-c", code], check=True)

    monkeypatch.setattr(import_time, "run_python", run_python)
    assert run(import_time, "--rounds 1")[0] == ["import bagua.torch_api : import torch"]


def test_compression(run):
    names, numbers = run(compression, "--rounds 1 --bytes 4000 --codec sign --codec topk")
    assert len(names) == 6
    assert numbers["notes"]["sign: part of the bytes"] == 0.032


def test_decentralized(run, monkeypatch):
    monkeypatch.setattr(decentralized, "DECENT_LIMITS", {None: 0.7})
    names, _ = run(decentralized, "--rounds 1 --hidden 8 --batch 2 --nproc 2 --against DDP")
    assert names == ["2 ranks, batch 2: bagua on the default : DDP"]


def test_lightning(run, monkeypatch):
    lightning = pytest.importorskip("benchmarks.lightning", reason="needs the extra lightning")
    monkeypatch.setattr(lightning, "LIMITS", {"our wrapper by hand": 1.03})
    names, _ = run(lightning, "--rounds 1 --hidden 8 --batch 2")
    assert names == ["2 ranks, batch 2: bagua : our wrapper by hand"]


def test_outer_optimizer(run, capsys):
    words = "--ranks 2 --steps 4 --seeds 1 --every 2 --rates 0.7 --momenta 0 0.5"
    _, numbers = run(outer_optimizer, words)
    assert sorted(numbers) == ["2: 0.7, 0", "2: 0.7, 0.5", "2: guarded"]
    assert all(0.5 < ratio < 2 for ratios in numbers.values() for ratio in ratios)
    assert "H=2: the best is 0.7, 0" in capsys.readouterr().out
