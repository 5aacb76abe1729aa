"""Killed, stopped, interrupted and leaving ranks on Gloo: in real processes, which also must end well."""

from __future__ import annotations

import pytest

from tests.comm.c10d_ranks import Processes

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

#: What C++ says when it kills the process at exit.
LAST_WORDS = ("terminate called", "Fatal Python error", "Segmentation fault")


def ends_with(processes: Processes, rank: int, *words: str, status: int = 3) -> None:
    """``rank`` ends by itself, in time, with ``status``, and says ``words``."""
    code, output = processes.end(rank)
    assert not any(last in output for last in LAST_WORDS), output
    for word in words:
        assert word in output, output
    assert code == status, output


@pytest.mark.parametrize("scenario", ["killed_in_the_middle", "killed_while_others_wait"])
def test_survivors_name_a_killed_rank_soon(scenario: str) -> None:
    with Processes(scenario, 3) as processes:
        for survivor in (0, 1):
            ends_with(processes, survivor, "PeerLostError peers=(2,) soon=True")


def test_the_host_of_the_store_is_killed() -> None:
    with Processes("store_host_killed", 3, own_store=True) as processes:
        for survivor in (1, 2):
            ends_with(processes, survivor, "PeerLostError peers=(0,) soon=True", "lost rank 0: it ended")


def test_a_stopped_rank_times_the_others_out() -> None:
    with Processes("stopped", 3) as processes:
        for survivor in (0, 1):
            ends_with(processes, survivor, "CollectiveTimeoutError peers=(2,) soon=True")


def test_a_stopped_host_of_the_store_holds_nobody() -> None:
    with Processes("stopped_host", 2, own_store=True) as processes:
        ends_with(processes, 1, "CollectiveTimeoutError peers=(0,) soon=True")


@pytest.mark.parametrize("scenario", ["interrupted", "interrupted_in_a_message"])
def test_an_interrupt_breaks_the_communicator_with_a_reason(scenario: str) -> None:
    with Processes(scenario, 2) as processes:
        ends_with(processes, 1, "KeyboardInterrupt", "soon=True")
        ends_with(processes, 0, "PeerLostError peers=(1,) soon=True", "lost rank 1: it left", "KeyboardInterrupt")


def test_a_process_ends_well_with_calls_under_way() -> None:
    with Processes("leaves_with_calls_under_way", 2) as processes:
        ends_with(processes, 0, "ready", status=0)
        ends_with(processes, 1, "ready", status=0)


def test_a_call_that_timed_out_leaves_the_tensor_alone() -> None:
    with Processes("late_writes", 2) as processes:
        ends_with(processes, 0, "untouched True", "CollectiveTimeoutError")
