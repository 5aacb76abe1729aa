"""Killed, interrupted and leaving ranks on Gloo: in real processes, which also must end well."""

from __future__ import annotations

import pytest

from tests.launching import PATIENCE_S, launched

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

#: What C++ says when it kills the process at exit.
LAST_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault")
LOST = "PeerLostError peers=({},) soon=True lost rank {}: it {}"

#: For each scenario of ``c10d_scenarios.py`` the number of ranks, and what those say that end by themselves.
SCENARIOS = {
    "killed_in_the_middle": (3, dict.fromkeys((0, 1), ("PeerLostError peers=(2,) soon=True",))),
    "store_host_killed": (3, dict.fromkeys((1, 2), (LOST.format(0, 0, "ended"),))),
    "interrupted": (2, {1: ("KeyboardInterrupt", "soon=True"), 0: (LOST.format(1, 1, "left"), "KeyboardInterrupt")}),
    "late_writes": (2, {0: ("untouched True", "CollectiveTimeoutError")}),
    "leaves_with_calls_under_way": (2, dict.fromkeys((0, 1), ("ready",))),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_end_by_themselves_in_time_and_say_why(scenario: str) -> None:
    size, expected = SCENARIOS[scenario]
    with launched(size, "-m", "tests.comm.c10d_scenarios", scenario) as ranks:
        for rank, words in expected.items():
            output, _ = ranks[rank].communicate(timeout=PATIENCE_S)
            assert not any(last in output for last in LAST_WORDS), output
            assert all(word in output for word in words), output
            assert ranks[rank].returncode == (0 if scenario == "leaves_with_calls_under_way" else 3), output
