"""The benchmark of tuning: it runs, and tells what it found."""

import argparse
import json

import pytest

from bagua.parallel import Setting
from benchmarks import autotune
from benchmarks.network.lab import refusal
from benchmarks.paired import Rounds

STEP_S = {Setting(1024): 0.3, Setting(2048): 0.1, Setting(2048, True): 0.11}


def tell(tmp_path, chosen, pairs):
    options = argparse.Namespace(rounds=20, json=tmp_path / "numbers.json")
    status = autotune.tell([autotune.Found(STEP_S, chosen, 1.0, 10, pairs)] * 2, options)
    return status, json.loads(options.json.read_text())


def test_the_best_needs_no_comparison(tmp_path, capsys):
    status, numbers = tell(tmp_path, Setting(2048), None)
    assert status == 0
    assert numbers["comparisons"] == []
    assert numbers["notes"]["worst of the sweep : best of the sweep"] == 3.0
    first = capsys.readouterr().out.splitlines()[1]
    assert "2048 flat" in first
    assert "chosen" in first


@pytest.mark.parametrize(("seconds", "status"), [(0.101, 0), (0.2, 1)])
def test_another_choice_is_held_to_the_limit(tmp_path, seconds, status):
    pairs = Rounds([0.1] * 20, [seconds] * 20, [0.1] * 20)
    assert tell(tmp_path, Setting(2048, True), pairs)[0] == status


@pytest.mark.gloo
@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
def test_a_small_sweep_and_a_short_search(tmp_path):
    small = ["--layers", "3", "--width", "16", "--ranks-per-host", "1", "--rate", "1000"]
    short = ["--sweep-rounds", "1", "--steps", "1", "--rounds", "1", "--confidence", "0"]
    assert autotune.main([*small, *short, "--json", str(tmp_path / "numbers.json")]) == 0
    notes = json.loads((tmp_path / "numbers.json").read_text())["notes"]
    assert notes["worst of the sweep : best of the sweep"] >= 1.0
    assert notes["steps until the choice"] > 4
