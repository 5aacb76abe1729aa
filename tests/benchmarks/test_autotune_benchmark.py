"""The benchmark of tuning: it runs, and tells what it found."""

from __future__ import annotations

import argparse
import json

import pytest

import bagua.comm
from bagua.cli.launch import Rank
from bagua.parallel import Setting
from benchmarks import autotune
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


class Nowhere:
    """Takes the place of a place in the lab: the ranks have met already, and links are what they are."""

    keeps_rate = False

    @property
    def network(self) -> Nowhere:
        return self

    def set_rate(self, rate_mbit_s: float | None) -> None:
        pass

    def join(self, rank: Rank) -> None:
        pass


def search() -> autotune.Found:
    rank = Rank(bagua.comm.get_rank(), bagua.comm.get_world_size(), 0, lambda _: None, local_world_size=2)
    plan = autotune.Plan(Nowhere(), None, "gradient_allreduce", 3, 16, 1, 1, 0.0, 1)
    return autotune.search(rank, plan)


@pytest.mark.gloo
def test_a_small_sweep_and_a_short_search(process_ranks):
    first, second = process_ranks(2, search)
    assert first.chosen == second.chosen
    swept = [setting.bucket_bytes for setting in first.step_s]
    assert min(swept) <= first.chosen.bucket_bytes <= max(swept)  # The search looks between them, too.
    assert first.step_s == second.step_s
    assert len(first.step_s) == 3
    assert first.tuning_steps > 4
