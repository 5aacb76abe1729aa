"""Islands that are processes, over Gloo and a store of its own: one is killed, one comes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.interpreters import interpreter
from tests.membership.forked_islands import PERIOD

pytestmark = pytest.mark.gloo


def test_a_killed_island_costs_the_others_nothing_and_a_new_one_takes_part():
    command = [*interpreter(), "-m", "tests.membership.forked_islands"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ends"] == {"0": 0, "1": signal.SIGKILL, "2": 0, "3": 0}
    assert found["server"] == 0
    by_step: dict[int, dict] = {}
    for one in found["said"]:
        other = by_step.setdefault(one["step"], one)
        assert (other["sum"], other["contributed"]) == (one["sum"], one["contributed"])
    assert sorted(by_step) == [PERIOD * (number + 1) for number in range(len(by_step))]
    lost = next(one["seat"] for one in found["said"] if one["number"] == 1)
    new = next(one["seat"] for one in found["said"] if one["number"] == 3)
    crowds = [tuple(by_step[step]["contributed"]) for step in sorted(by_step)]
    stayed = tuple(seat for seat in range(3) if seat != lost)
    wanted = [(0, 1, 2), stayed, (*stayed, new)]
    assert [crowd for crowd in dict.fromkeys(crowds) if len(crowd) > 1 and crowd in wanted] == wanted
