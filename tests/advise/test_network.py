"""What messages cost: against the formulas of the literature, written out here once more."""

from __future__ import annotations

import math

import pytest

from bagua.advise import CallFacts, Cluster, MachineFacts, Message
from bagua.advise.network import cost_of
from bagua.errors import ConfigurationError
from bagua.link import LinkSettings, parse_link

MACHINE = MachineFacts(message_s=1e-4, byte_s=0.0001e-9, cores=8)
SIZE = 10e6


def cost(kind: str, ranks: int, hosts: int, nbytes: float = SIZE, link: str = "1gbit,1ms") -> tuple[float, float]:
    cluster = Cluster(hosts, ranks // hosts, parse_link(link))
    found = cost_of(Message(kind, nbytes, ranks, hosts), cluster, MACHINE)
    return found.latency_s + found.work_s, found.link_bytes


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_an_allreduce_is_a_ring(ranks: int) -> None:
    latency_s, link_bytes = cost("allreduce", ranks, ranks, link="1gbit")
    assert link_bytes == pytest.approx(2 * (ranks - 1) / ranks * SIZE)
    assert latency_s == pytest.approx(2 * (ranks - 1) * 1e-4)


def test_a_ring_leaves_each_host_once_however_many_ranks_are_on_it() -> None:
    alone, together = cost("allreduce", 4, 4)[1], cost("allreduce", 16, 4)[1]
    assert together / alone == pytest.approx((2 * 15 / 16) / (2 * 3 / 4))


def test_all_to_all_goes_to_ranks_of_other_hosts() -> None:
    # Each of 8 ranks has an eighth for each other one, and 4 of those are on the other host.
    assert cost("alltoall", 8, 2)[1] == pytest.approx(4 * 4 * SIZE / 8)
    # Each gathers eight eighths, of which it has sent one to each other rank.
    assert cost("allgather", 8, 2)[1] == pytest.approx(4 * 4 * SIZE / 8)


@pytest.mark.parametrize(
    ("kind", "nbytes", "of_two", "of_four"),
    [
        ("allreduce", 64, 4, 12),
        ("allreduce", 4_000_000, 4, 12),
        ("allreduce", 4_200_000, 8, 12),  # a rank's share in three pieces, of which two are on their way
        ("allreduce", 8_500_000, 12, 20),
        ("allreduce", 16_000_000, 16, 24),
        ("allgather", 64, 2, 6),
        ("allgather", 400_000, 2, 2),
        ("alltoall", 64, 2, 2),
        ("sendrecv", 64, 2, 2),
        ("broadcast", 64, 2, 2),
        ("barrier", 0, 2, 4),
        ("reduce", 64, 4, 8),
    ],
)
def test_delays_are_as_many_as_were_counted_in_the_lab(kind: str, nbytes: int, of_two: int, of_four: int) -> None:
    for hosts, delays in ((2, of_two), (4, of_four)):
        near, far = (cost_of(Message(kind, nbytes, hosts, hosts), there, MACHINE) for there in clusters(hosts))
        assert far.latency_s - near.latency_s == pytest.approx(delays * 0.02)


def clusters(hosts: int) -> list[Cluster]:
    return [Cluster(hosts, 1, parse_link(link)) for link in ("1gbit", "1gbit,20ms")]


def test_kinds_of_calls_cost_what_was_measured_of_them() -> None:
    calls = (CallFacts("allreduce", 3e-4, ((1e6, 1e-3), (2e6, 4e-3))), CallFacts("alltoall", 2e-4, ((1e6, 2e-3),)))
    machine = MachineFacts(message_s=1e-4, byte_s=5e-9, calls=calls)
    cluster = Cluster(4, 1, parse_link("1gbit"))
    ring = cost_of(Message("allreduce", 1e6, 4, 4), cluster, machine)  # each rank sends 1.5 MB, in 6 messages
    assert (ring.work_s, ring.byte_s * ring.own_bytes) == pytest.approx((6 * 3e-4, 2.5e-3))
    # Beyond the last point as between it and the one before; a kind that was not measured as one that is alike.
    swap = cost_of(Message("reduce_scatter", 4e6, 4, 4), cluster, machine)
    assert (swap.work_s, swap.byte_s * swap.own_bytes) == pytest.approx((3 * 2e-4, 6e-3))
    pair = cost_of(Message("sendrecv", 1e6, 4, 4), cluster, machine)
    assert (pair.work_s, pair.byte_s) == pytest.approx((1e-4, 5e-9))


def test_what_keeps_no_core_busy_is_waiting() -> None:
    # A byte takes a microsecond, for a quarter of which a core is busy; a message takes 4 ms, and 1 of them on a core.
    calls = (CallFacts("allreduce", 4e-3, ((1e6, 1.0),), busy=0.25, busy_bytes=0.25),)
    message, cluster = Message("allreduce", 1e6, 4, 4), Cluster(4, shared=True)
    alone = cost_of(message, cluster, MachineFacts(cores=4, calls=calls, ranks=4))
    assert (alone.work_s, alone.latency_s) == pytest.approx((6 * 1e-3, 6 * 3e-3))
    assert (alone.byte_s, alone.byte_work_s) == pytest.approx((1e-6, 0.25e-6))
    # Four ranks that shared two cores then took 2 ms for that work, and waited for 2.
    crowded = cost_of(message, cluster, MachineFacts(cores=2, calls=calls, ranks=4))
    assert (crowded.work_s, crowded.latency_s) == pytest.approx((6 * 1e-3, 6 * 2e-3))


def test_calls_that_were_made_on_the_link_say_what_it_does_to_them() -> None:
    link = parse_link("1gbit,5ms")
    rate = 1e9 / 8 * 1448 / 1514
    # A small call took 3 ms longer than its two delays and its message, and bytes a quarter longer than at full rate.
    seen = (CallFacts("sendrecv", 1e-4 + 0.010 + 0.003, ((1e6, 1.25 * 1e6 / rate), (4e6, 1.25 * 4e6 / rate))),)
    there, known = Cluster(2, 1, link, calls=seen), Cluster(2, 1, link)
    message = Message("sendrecv", 2e6, 2, 2)
    found, formula = (cost_of(message, cluster, MACHINE) for cluster in (there, known))
    # What bytes took longer is waiting, in which other calls may have the link.
    assert found.latency_s == pytest.approx(0.010 + 0.003 + 0.25 * 2e6 / rate)
    assert found.link_bytes == pytest.approx(2e6)
    assert (formula.latency_s, formula.link_bytes) == pytest.approx((0.010, 2e6))
    # Four ranks on two cores: messages took twice the work of one on a core of its own, which is no part of the wait.
    slow = (CallFacts("sendrecv", 2e-4 + 0.010 + 0.003, seen[0].points),)
    two_cores = MachineFacts(message_s=1e-4, byte_s=0.0001e-9, cores=2)
    crowded = cost_of(Message("sendrecv", 2e6, 4, 4), Cluster(4, 1, link, shared=True, calls=slow), two_cores)
    assert crowded.latency_s == pytest.approx(0.010 + 0.003 + 0.25 * 2e6 / rate)
    # Without a delay, a call that takes longer has the link for longer.
    near = cost_of(
        message, Cluster(2, 1, parse_link("1gbit"), calls=(CallFacts("sendrecv", 1e-4, seen[0].points),)), MACHINE
    )
    assert (near.latency_s, near.link_bytes) == pytest.approx((0.0, 1.25 * 2e6))
    # A kind that was not seen follows the formula; no call is faster than the link.
    assert cost_of(Message("alltoall", 2e6, 2, 2), there, MACHINE).link_bytes == pytest.approx(1e6)
    fast = Cluster(2, 1, link, calls=(CallFacts("sendrecv", 0.0, ((1e6, 1e-9),)),))
    assert cost_of(message, fast, MACHINE) == formula


def test_large_calls_may_take_a_shorter_way_than_small_ones() -> None:
    link = parse_link("1gbit,20ms")
    rate = 1e9 / 8 * 1448 / 1514
    # Small gathers go around a ring of four hosts, six ways of 20 ms; large ones to all at once, two of 25 ms.
    sent = 0.75 * 1e6
    seen = (CallFacts("allgather", 0.04, ((sent, 0.05 + sent / rate - 0.12),)),)
    there, alone = Cluster(4, 1, link, calls=seen), MachineFacts(message_s=0.0, byte_s=0.0)
    assert cost_of(Message("allgather", 1e6, 4, 4), there, alone).latency_s == pytest.approx(0.05)
    assert cost_of(Message("allgather", 64.0, 4, 4), there, alone).latency_s == pytest.approx(0.12)


def test_a_long_way_is_filled_step_by_step_after_a_pause() -> None:
    # 10 packets at first, and twice as many after each answer, until 40 ms of 100 Mbit/s are on the way.
    rate = 100e6 / 8 * 1448 / 1514
    window, lost, left = 14480.0, 0.0, SIZE
    while window < rate * 0.04:
        lost, left, window = lost + 0.04 - window / rate, left - window, 2 * window
    assert left > 0
    there, message = Cluster(2, 1, parse_link("100mbit,20ms")), Message("sendrecv", SIZE, 2, 2)
    assert cost_of(message, there, MACHINE, idle_s=0.23).latency_s == pytest.approx(2 * 0.02)
    assert cost_of(message, there, MACHINE, idle_s=0.25).latency_s == pytest.approx(2 * 0.02 + lost)


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
