"""Islands of two processes, over shared memory, Gloo and a store of its own: a rank is killed, an island comes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from tests.interpreters import interpreter
from tests.membership.forked_islands import PERIOD

pytestmark = pytest.mark.gloo


def test_a_killed_rank_takes_its_island_out_and_a_new_island_takes_part():
    command = [*interpreter(), "-m", "tests.membership.forked_islands"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    failed = 1 << 8
    assert found["ends"] == {"0.0": 0, "0.1": 0, "1.0": failed, "1.1": signal.SIGKILL, "2.0": 0, "2.1": 0}
    assert found["server"] == 0
    by_step: dict[int, dict] = {}
    for one in found["said"]:
        other = by_step.setdefault(one["step"], one)
        assert (other["sum"], other["contributed"]) == (one["sum"], one["contributed"])
    assert sorted(by_step) == [PERIOD * (number + 1) for number in range(len(by_step))]
    stayed, new = (next(one["seat"] for one in found["said"] if one["number"] == number) for number in (0, 2))
    crowds = [tuple(by_step[step]["contributed"]) for step in sorted(by_step)]
    wanted = [(0, 1), (stayed,), (stayed, new)]
    assert [crowd for crowd in dict.fromkeys(crowds) if crowd in wanted] == wanted
