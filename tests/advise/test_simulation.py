"""What messages cost, against the formulas of the literature, and the event loop, against times added up by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.advise import CallFacts, Cluster, MachineFacts, Message, Moment, Rehearsal, Run
from bagua.advise.network import cost_of
from bagua.advise.prediction import max_min_shares, step_seconds
from bagua.errors import ConfigurationError
from bagua.link import LinkSettings, parse_link

EIGHT_CORES = MachineFacts(message_s=1e-4, byte_s=0.0001e-9, cores=8)
SIZE = 10e6


def cost(kind: str, ranks: int, hosts: int, nbytes: float = SIZE, link: str = "1gbit,1ms") -> tuple[float, float]:
    cluster = Cluster(hosts, ranks // hosts, parse_link(link))
    found = cost_of(Message(kind, nbytes, ranks, hosts), cluster, EIGHT_CORES)
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
        # Above 4 MB a share of two ranks is sent in pieces, of which two are on their way.
        ("allreduce", 64, 4, 12), ("allreduce", 4_000_000, 4, 12), ("allreduce", 4_200_000, 8, 12),
        ("allreduce", 8_500_000, 12, 20), ("allreduce", 16_000_000, 16, 24), ("allgather", 64, 2, 6),
        ("allgather", 400_000, 2, 2), ("alltoall", 64, 2, 2), ("sendrecv", 64, 2, 2), ("broadcast", 64, 2, 2),
        ("barrier", 0, 2, 4), ("reduce", 64, 4, 8),
    ],
)  # fmt: skip
def test_delays_are_as_many_as_were_counted_in_the_lab(kind: str, nbytes: int, of_two: int, of_four: int) -> None:
    for hosts, delays in ((2, of_two), (4, of_four)):
        clusters = (Cluster(hosts, 1, parse_link(link)) for link in ("1gbit", "1gbit,20ms"))
        near, far = (cost_of(Message(kind, nbytes, hosts, hosts), there, EIGHT_CORES) for there in clusters)
        assert far.latency_s - near.latency_s == pytest.approx(delays * 0.02)


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
    found, formula = (cost_of(message, cluster, EIGHT_CORES) for cluster in (there, known))
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
    prompt = Cluster(2, 1, parse_link("1gbit"), calls=(CallFacts("sendrecv", 1e-4, seen[0].points),))
    near = cost_of(message, prompt, EIGHT_CORES)
    assert (near.latency_s, near.link_bytes) == pytest.approx((0.0, 1.25 * 2e6))
    # A kind that was not seen follows the formula; no call is faster than the link.
    assert cost_of(Message("alltoall", 2e6, 2, 2), there, EIGHT_CORES).link_bytes == pytest.approx(1e6)
    fast = Cluster(2, 1, link, calls=(CallFacts("sendrecv", 0.0, ((1e6, 1e-9),)),))
    assert cost_of(message, fast, EIGHT_CORES) == formula


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
    assert cost_of(message, there, EIGHT_CORES, idle_s=0.23).latency_s == pytest.approx(2 * 0.02)
    assert cost_of(message, there, EIGHT_CORES, idle_s=0.25).latency_s == pytest.approx(2 * 0.02 + lost)


def test_nothing_leaves_a_host_that_is_alone() -> None:
    assert cost("allreduce", 4, 1)[1] == 0
    assert cost("allreduce", 1, 1) == (0.0, 0.0)


def test_the_slower_direction_limits_a_link() -> None:
    there = Cluster(2, 1, parse_link("100mbit/10mbit"))
    assert there.bytes_per_s == pytest.approx(10e6 / 8 * 1448 / 1514)
    assert math.isinf(Cluster(2, 1, LinkSettings()).bytes_per_s)


def test_lost_packets_limit_a_connection() -> None:
    there, without = (Cluster(2, 1, parse_link(link)) for link in ("1gbit,10ms,1%", "1gbit,10ms"))
    assert there.connection_bytes_per_s == pytest.approx(1448 / 0.02 * math.sqrt(1.5 / 0.01))
    lossy, clean = (cost_of(Message("sendrecv", SIZE, 2, 2), one, EIGHT_CORES) for one in (there, without))
    assert lossy.latency_s > clean.latency_s + 1


def test_a_cluster_without_hosts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="hosts"):
        Cluster(0)


MACHINE = MachineFacts(message_s=0.0, byte_s=0.0, cores=8)
TWO_CORES, COLD = replace(MACHINE, cores=2), replace(MACHINE, after_calls=1.5)
#: One byte takes a microsecond.
CLUSTER = Cluster(2, 1, parse_link(f"{8 * 1514 / 1448}mbit"))
UNLIMITED, ONE_MACHINE = Cluster(2, 1, parse_link("unlimited")), Cluster(4, 1, CLUSTER.link, shared=True)
#: The first 100 kB of each step pass at once: it is full again a second later.
BURST = replace(CLUSTER, burst_bytes=100_000)
ARRIVALS, STEP_S = (0.5, 1.0), 1.2


def sending(nbytes: float, lane: str = "", before: float = 0.0, after: float = 0.0) -> Run:
    return Run((before, Message("sendrecv", nbytes, 2, 2), after), lane)


def moments(text: str) -> tuple[Moment, ...]:
    """``a0 s1 w1 t``: gradient 0 is there, run 1 starts, is waited for, the optimizer steps."""
    kinds: dict[str, Any] = {"a": "arrival", "s": "start", "w": "wait", "t": "stepped"}
    return tuple(Moment(kinds[word[0]], int(word[1:2] or 0), word.count("'")) for word in text.split())


ALONE, EARLY, LATE = "a0 a1 t", "a0 s0 a1 w0 t", "a0 a1 s0 w0 t"
BOTH, IN_TURN = "a0 a1 s0 s1 w0 w1 t", "a0 s0 a1 s1 w0 w1 t"
IN_LANE = [sending(100_000, "lane", before=0.1), sending(100_000, "lane", after=0.1)]
SELDOM = (ALONE, ALONE, ALONE, "a0 a1 t s0 w0")
Steps = str | tuple[str, ...]


def seconds(
    steps: Steps, *runs: Run, machine: MachineFacts = MACHINE, cluster: Cluster = CLUSTER, periods: int = 3
) -> float:
    """How long a step takes of those that are made again and again, with the runs that they start."""
    texts = (steps,) if isinstance(steps, str) else steps
    rehearsal = Rehearsal("test", tuple(map(moments, texts)), runs)
    return step_seconds(rehearsal, ARRIVALS, STEP_S, cluster, machine, [1.0] * (periods * len(texts)))


@pytest.mark.parametrize(
    ("steps", "runs", "more", "expected"),
    [
        pytest.param(ALONE, [], {}, STEP_S, id="without exchanges"),
        pytest.param(LATE, [sending(300_000)], {}, STEP_S + 0.3, id="all of it after the last gradient"),
        pytest.param(EARLY, [sending(300_000)], {}, STEP_S, id="hidden behind the backward pass"),
        pytest.param(EARLY, [sending(700_000)], {}, STEP_S + 0.2, id="longer than the backward pass"),
        # The first has the link for 0.5 s, they share it for 0.4 s, and 0.1 s are left of the second.
        pytest.param(IN_TURN, [sending(700_000), sending(300_000)], {}, STEP_S + 0.5, id="two share the link"),
        pytest.param(BOTH, IN_LANE, {}, STEP_S + 0.4, id="one after the other in a background thread"),
        pytest.param(EARLY, [sending(100_000, before=0.2)], {}, STEP_S + 0.2, id="after work that holds up a thread"),
        pytest.param(SELDOM, [sending(400_000)], {}, STEP_S + 0.1, id="in every fourth step"),
        pytest.param("a0 a1 t w0' s0", [sending(1_000_000)], {"periods": 6}, STEP_S, id="behind a whole step"),
        pytest.param(LATE, [sending(300_000)], {"cluster": UNLIMITED}, STEP_S, id="a link without limit"),
        pytest.param(LATE, [sending(300_000)], {"cluster": BURST, "periods": 4}, STEP_S + 0.2, id="a bucket of tokens"),
        pytest.param(ALONE, [], {"cluster": ONE_MACHINE, "machine": TWO_CORES}, 2 * STEP_S, id="hosts share cores"),
        pytest.param(ALONE, [], {"machine": COLD}, STEP_S, id="warm caches"),
        pytest.param(LATE, [sending(300_000)], {"machine": COLD}, 1.5 * STEP_S + 0.3, id="cold caches after a call"),
        # Of four steps, one follows the call.
        pytest.param(SELDOM, [sending(400_000)], {"machine": COLD}, 4.5 / 4 * STEP_S + 0.1, id="cold caches, seldom"),
    ],
)
def test_a_step_takes_what_adds_up(steps: Steps, runs: list[Run], more: dict[str, Any], expected: float) -> None:
    assert seconds(steps, *runs, **more) == pytest.approx(expected)


def test_a_call_that_waits_for_its_next_message_leaves_the_link_to_others() -> None:
    # A way takes 0.6 s. An allreduce between two waits for two of them, sends a half, waits for two, sends the rest.
    far = Cluster(2, 1, parse_link(f"{8 * 1514 / 1448}mbit,600ms"))
    small, large = (Run((Message("allreduce", nbytes, 2, 2), 0.0)) for nbytes in (200_000, 800_000))
    assert seconds(LATE, large, cluster=far) == pytest.approx(STEP_S + 2 * 1.2 + 0.8)
    # From 1.2 s on both share the link, until the small one has sent its half, 0.1 s, at 1.4. The large one has 0.3 s
    # left then, waits from 1.7 to 2.9, and sends 0.4 s. The small one has ended in that wait, from 2.6 to 2.7.
    assert seconds(BOTH, small, large, cluster=far) == pytest.approx(STEP_S + 3.3)


def test_a_call_that_waits_leaves_the_core_to_what_is_computed() -> None:
    # A message takes 0.2 s, for half of which it keeps the only core busy: then what is computed takes twice as long.
    run = Run((Message("sendrecv", 0.0, 2, 2), 0.0), "lane")
    for busy, added_s in ((1.0, 0.2), (0.5, 0.1), (0.0, 0.0)):
        calls = (CallFacts("sendrecv", 0.2, ((1.0, 0.0),), busy=busy),)
        found = seconds(EARLY, run, machine=MachineFacts(cores=1, calls=calls, ranks=1))
        assert found == pytest.approx(STEP_S + added_s)


def test_bytes_load_a_core_as_much_as_was_measured() -> None:
    # 300 KB take 0.3 s of the link, and a core for a part of that: what is computed beside them takes longer.
    for busy, added_s in ((0.5, 0.15), (0.1, 0.03)):
        calls = (CallFacts("sendrecv", 0.0, ((1e6, 1.0),), busy_bytes=busy),)
        found = seconds(EARLY, sending(300_000), machine=MachineFacts(cores=1, calls=calls, ranks=1))
        assert found == pytest.approx(STEP_S + added_s)


def test_what_is_waited_for_a_period_later_limits_steps_in_the_end() -> None:
    assert seconds("a0 a1 t w0' s0", sending(2_400_000), periods=20) == pytest.approx(2.4, rel=0.1)


def test_threads_share_the_cores_that_a_rank_has() -> None:
    codec = Run((Message("sendrecv", 1.0, 2, 2), 0.4), "lane")
    assert seconds(EARLY, codec) == pytest.approx(STEP_S, abs=1e-4)
    # Both go at half speed until the codec is through with its 0.4 s.
    assert seconds(EARLY, codec, machine=replace(MACHINE, cores=1)) == pytest.approx(STEP_S + 0.4, abs=1e-4)


def test_the_second_call_has_of_a_bucket_of_tokens_what_that_gains_in_between() -> None:
    twice = Run((Message("sendrecv", 150_000, 2, 2), 0.1, Message("sendrecv", 150_000, 2, 2)))
    there = replace(CLUSTER, burst_bytes=150_000)
    assert seconds(LATE, twice, cluster=there, periods=4) == pytest.approx(STEP_S + 0.1 + 0.05)


@given(st.floats(0.1, 100), st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_shares_are_max_min_fair(capacity: float, limits: list[float]) -> None:
    shares = max_min_shares(capacity, limits)
    assert sum(shares) == pytest.approx(min(capacity, sum(limits)))
    for share, limit in zip(shares, limits, strict=True):
        assert share <= limit * (1 + 1e-9)
        # Who gets less than it wants gets as much as anybody.
        assert share == pytest.approx(limit) or share >= max(shares) * (1 - 1e-9)
