"""The event loop, against times that can be added up by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.advise import CallFacts, Cluster, MachineFacts, Message, Moment, Rehearsal, Run
from bagua.advise.prediction import max_min_shares, step_seconds
from bagua.link import parse_link

MACHINE = MachineFacts(message_s=0.0, byte_s=0.0, cores=8)
#: One byte takes a microsecond.
CLUSTER = Cluster(2, 1, parse_link(f"{8 * 1514 / 1448}mbit"))
UNLIMITED = Cluster(2, 1, parse_link("unlimited"))
ARRIVALS, STEP_S = (0.5, 1.0), 1.2


def sending(nbytes: float, lane: str = "", before: float = 0.0, after: float = 0.0) -> Run:
    return Run((before, Message("sendrecv", nbytes, 2, 2), after), lane)


def moments(text: str) -> tuple[Moment, ...]:
    """``a0 s1 w1 t``: gradient 0 is there, run 1 starts, is waited for, the optimizer steps."""
    kinds = {"a": "arrival", "s": "start", "w": "wait", "t": "stepped"}
    return tuple(
        Moment(kinds[word[0]], int(word[1] if len(word) > 1 else 0), word.count("'"))  # type: ignore[arg-type]
        for word in text.split()
    )


ALONE, EARLY, LATE, BOTH = "a0 a1 t", "a0 s0 a1 w0 t", "a0 a1 s0 w0 t", "a0 a1 s0 s1 w0 w1 t"
SELDOM = (ALONE, ALONE, ALONE, "a0 a1 t s0 w0")


def seconds(
    steps: str | tuple[str, ...],
    *runs: Run,
    machine: MachineFacts = MACHINE,
    cluster: Cluster = CLUSTER,
    periods: int = 3,
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
        pytest.param(
            "a0 s0 a1 s1 w0 w1 t", [sending(700_000), sending(300_000)], {}, STEP_S + 0.5, id="two share the link"
        ),
        pytest.param(
            BOTH,
            [sending(100_000, "lane", before=0.1), sending(100_000, "lane", after=0.1)],
            {},
            STEP_S + 0.4,
            id="one after the other in a background thread",
        ),
        pytest.param(EARLY, [sending(100_000, before=0.2)], {}, STEP_S + 0.2, id="after work that holds up a thread"),
        pytest.param(SELDOM, [sending(400_000)], {}, STEP_S + 0.1, id="in every fourth step"),
        pytest.param("a0 a1 t w0' s0", [sending(1_000_000)], {"periods": 6}, STEP_S, id="behind a whole step"),
        pytest.param(LATE, [sending(300_000)], {"cluster": UNLIMITED}, STEP_S, id="a link without limit"),
    ],
)
def test_a_step_takes_what_can_be_added_up(
    steps: str | tuple[str, ...], runs: list[Run], more: dict[str, Any], expected: float
) -> None:
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


def test_a_bucket_of_tokens_lets_the_first_bytes_pass_at_once() -> None:
    # It is full again after each step: a byte each microsecond, for longer than a second.
    there = replace(CLUSTER, burst_bytes=100_000)
    assert seconds(LATE, sending(300_000), cluster=there, periods=4) == pytest.approx(STEP_S + 0.2)
    # What it gains in the 0.1 s between them is all that the second call has of it.
    twice = Run((Message("sendrecv", 150_000, 2, 2), 0.1, Message("sendrecv", 150_000, 2, 2)))
    there = replace(CLUSTER, burst_bytes=150_000)
    assert seconds(LATE, twice, cluster=there, periods=4) == pytest.approx(STEP_S + 0.1 + 0.05)


def test_messages_keep_a_core_busy() -> None:
    # The model computes on, at half its speed while the message is made.
    for cores, added_s in ((1, 0.05), (2, 0.0)):
        found = seconds(EARLY, sending(100_000), machine=MachineFacts(message_s=0.05, byte_s=0.0, cores=cores))
        assert found == pytest.approx(STEP_S + added_s)


def test_hosts_that_are_one_machine_share_its_cores() -> None:
    shared = Cluster(4, 1, CLUSTER.link, shared=True)
    assert seconds(ALONE, machine=replace(MACHINE, cores=2), cluster=shared, periods=2) == pytest.approx(2 * STEP_S)


def test_what_follows_a_call_is_computed_with_cold_caches() -> None:
    slower = replace(MACHINE, after_calls=1.5)
    assert seconds(LATE, sending(300_000), machine=slower) == pytest.approx(1.5 * STEP_S + 0.3)
    # Of four steps, one follows the call.
    assert seconds(SELDOM, sending(400_000), machine=slower) == pytest.approx((3 + 1.5) / 4 * STEP_S + 0.1)
    assert seconds(ALONE, machine=slower) == pytest.approx(STEP_S)


@given(st.floats(0.1, 100), st.lists(st.floats(0.1, 100), min_size=1, max_size=6))
def test_shares_are_max_min_fair(capacity: float, limits: list[float]) -> None:
    shares = max_min_shares(capacity, limits)
    assert sum(shares) == pytest.approx(min(capacity, sum(limits)))
    for share, limit in zip(shares, limits, strict=True):
        assert share <= limit * (1 + 1e-9)
        # Who gets less than it wants gets as much as anybody.
        assert share == pytest.approx(limit) or share >= max(shares) * (1 - 1e-9)
