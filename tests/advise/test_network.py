"""What messages cost: against the formulas of the literature, written out here once more."""

from __future__ import annotations

import math

import pytest

from bagua.advise import Cluster, MachineFacts, Message, cost_of
from bagua.errors import ConfigurationError
from bagua.link import LinkSettings, parse_link

MACHINE = MachineFacts(message_s=1e-4, byte_s=0.0001e-9, cores=8)
SIZE = 10e6


def cost(kind: str, ranks: int, hosts: int, nbytes: float = SIZE, link: str = "1gbit,1ms") -> tuple[float, float]:
    cluster = Cluster(hosts, ranks // hosts, parse_link(link))
    found = cost_of(Message(kind, nbytes, ranks, hosts), cluster, MACHINE)
    return found.latency_s, found.link_bytes


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_an_allreduce_is_a_ring(ranks: int) -> None:
    latency_s, link_bytes = cost("allreduce", ranks, ranks, link="1gbit")
    assert link_bytes == pytest.approx(2 * (ranks - 1) / ranks * SIZE)
    # And the request of the first receiver.
    assert latency_s == pytest.approx((2 * (ranks - 1) + 1) * 1e-4)


def test_a_ring_leaves_each_host_once_however_many_ranks_are_on_it() -> None:
    alone, together = cost("allreduce", 4, 4)[1], cost("allreduce", 16, 4)[1]
    assert together / alone == pytest.approx((2 * 15 / 16) / (2 * 3 / 4))


def test_all_to_all_goes_to_ranks_of_other_hosts() -> None:
    # Each of 8 ranks has an eighth for each other one, and 4 of those are on the other host.
    assert cost("alltoall", 8, 2)[1] == pytest.approx(4 * 4 * SIZE / 8)
    # Each gathers eight eighths, of which it has sent one to each other rank.
    assert cost("allgather", 8, 2)[1] == pytest.approx(4 * 4 * SIZE / 8)


def test_a_delay_counts_for_each_round() -> None:
    near, far = cost("allreduce", 4, 4, 64, "1gbit")[0], cost("allreduce", 4, 4, 64, "1gbit,20ms")[0]
    assert far - near == pytest.approx(7 * 0.02)


def test_a_long_way_is_filled_step_by_step_after_a_pause() -> None:
    # 10 packets at first, and twice as many after each answer, until 40 ms of 100 Mbit/s are on the way.
    rate = 100e6 / 8 * 1448 / 1514
    window, lost, left = 14480.0, 0.0, SIZE
    while window < rate * 0.04:
        lost, left, window = lost + 0.04 - window / rate, left - window, 2 * window
    assert left > 0
    there, message = Cluster(2, 1, parse_link("100mbit,20ms")), Message("sendrecv", SIZE, 2, 2)
    assert cost_of(message, there, MACHINE, idle_s=0.23).latency_s == pytest.approx(2 * (1e-4 + 0.02))
    assert cost_of(message, there, MACHINE, idle_s=0.25).latency_s == pytest.approx(2 * (1e-4 + 0.02) + lost)


def test_nothing_leaves_a_host_that_is_alone() -> None:
    assert cost("allreduce", 4, 1)[1] == 0
    assert cost("allreduce", 1, 1) == (0.0, 0.0)


def test_the_slower_direction_limits_a_link() -> None:
    there = Cluster(2, 1, parse_link("100mbit/10mbit"))
    assert there.bytes_per_s == pytest.approx(10e6 / 8 * 1448 / 1514)
    assert math.isinf(Cluster(2, 1, LinkSettings()).bytes_per_s)


def test_lost_packets_limit_a_connection() -> None:
    there = Cluster(2, 1, parse_link("1gbit,10ms,1%"))
    assert there.connection_bytes_per_s == pytest.approx(1448 / 0.02 * math.sqrt(1.5 / 0.01))
    message = Message("sendrecv", SIZE, 2, 2)
    lossy, clean = (
        cost_of(message, Cluster(2, 1, parse_link(link)), MACHINE) for link in ("1gbit,10ms,1%", "1gbit,10ms")
    )
    assert lossy.latency_s > clean.latency_s + 1


def test_a_cluster_without_hosts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="hosts"):
        Cluster(0)
