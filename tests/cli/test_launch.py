"""The launcher returns what ranks return, raises how they fail, and leaves no process behind."""

import os
import signal
import time

import pytest

from bagua.cli import launch
from bagua.cli.lab import network
from bagua.errors import CollectiveTimeoutError, PeerLostError
from tests.cli import launched

pytestmark = pytest.mark.gloo


@pytest.fixture(autouse=True)
def short_grace(forked_ranks, monkeypatch):
    monkeypatch.setattr(launch.CommandRanks, "grace_s", 2.0)


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_returns_values_in_rank_order_and_hands_on_reports():
    reports = []
    assert launch.run_ranks(launched.report_and_return, 2, (10,), reports.append) == [0, 10]
    assert sorted(reports) == [("hello", 0), ("hello", 1)]


@pytest.mark.skipif(network.refusal() is not None, reason=str(network.refusal()))
def test_ranks_live_on_the_hosts_of_a_lab_and_send_through_its_links():
    with network.open_network(2) as hosts:
        found = launch.run_ranks(launched.sum_on_a_host, 2, (250_000,), network=hosts)
    for total, sent_bytes in found:
        assert total == 3.0
        assert sent_bytes > 1_000_000  # An allreduce among two sends as many bytes as the tensor has.


def test_an_error_of_one_rank_arrives_with_its_type_and_facts():
    with pytest.raises(launch.RanksFailedError) as caught:
        launch.run_ranks(launched.rank_one_raises, 2)
    (failure,) = caught.value.failures
    assert failure.rank == 1
    assert isinstance(failure.error, CollectiveTimeoutError)
    assert failure.error.timeout_s == 2.5
    assert "rank_one_raises" in failure.trace


def test_the_cause_comes_before_the_errors_that_follow_from_it():
    with pytest.raises(
        launch.RanksFailedError, match="rank 1 was killed by SIGKILL; rank 0 failed: PeerLost"
    ) as caught:
        launch.run_ranks(launched.rank_one_dies_and_the_other_notices, 2)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    assert isinstance(caught.value.failures[1].error, PeerLostError)


def test_a_rank_that_dies_in_the_middle_of_a_message_is_a_failure_as_any_other():
    with pytest.raises(launch.RanksFailedError, match="rank 0 was killed by SIGKILL"):
        launch.run_ranks(launched.die_in_the_middle_of_a_message, 1)


def test_an_interrupt_ends_all_processes():
    process_ids = []

    def interrupt_at_second_report(report: object) -> None:
        process_ids.append(report)
        if len(process_ids) == 2:
            signal.raise_signal(signal.SIGINT)

    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        launch.run_ranks(launched.sleep_long, 2, (), interrupt_at_second_report)
    assert time.monotonic() - start_s < 50  # they did not sleep to the end
    assert not any(is_running(process_id) for process_id in process_ids)
