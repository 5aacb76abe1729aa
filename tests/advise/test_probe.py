"""Probes: what is measured of calls, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bagua.advise import CallFacts, Cluster, probe, probe_machine
from bagua.comm import get_default_group, get_rank
from bagua.link import parse_link
from bagua.testing import ThreadRanks
from benchmarks import lab_calls
from benchmarks.lab_calls import link_facts

KINDS = ["allreduce", "allgather", "alltoall", "sendrecv"]
MEGA = 1024.0 * 1024


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ROUNDS", 3)
    monkeypatch.setattr(probe, "_SMALL_ROUNDS", 3)
    monkeypatch.setattr(lab_calls, "_MOST_ROUNDS", 3)


def on_link(link: str) -> tuple[CallFacts, ...]:
    group = get_default_group()
    return link_facts(group, Cluster(group.size, 1, parse_link(link)))


def test_each_kind_is_measured_on_a_link_by_what_a_rank_sends() -> None:
    found = ThreadRanks(4).run(on_link, "1gbit")[0]
    assert [one.kind for one in found] == KINDS
    sent = {one.kind: [sent for sent, _ in one.points] for one in found}
    for kind, share in (("allreduce", 1.5), ("allgather", 0.75), ("alltoall", 0.75), ("sendrecv", 1.0)):
        assert sent[kind] == pytest.approx([share * size * MEGA for size in (1 / 32, 0.25, 1, 4)])


def test_a_slow_link_is_measured_with_few_bytes() -> None:
    found = ThreadRanks(2).run(on_link, "2mbit")[0]
    # 256 KiB take 1.1 seconds there, and a MiB 4.4; of a gathered MiB, a rank sends a half.
    assert [[sent / MEGA for sent, _ in one.points] for one in found] == [
        [1 / 32, 0.25], [1 / 64, 0.125], [1 / 64, 0.125], [1 / 32, 0.25]
    ]  # fmt: skip


def usual(before: Callable[[], object] | None) -> dict[tuple[str, int], float]:
    """Mean seconds of three calls of one kind, one of another, and none of a third."""
    wanted = {("allreduce", 64): 3, ("sendrecv", 1024): 1, ("alltoall", 64): 0}
    communicator = get_default_group().global_communicator
    found = probe.usual_calls(communicator, wanted, before)
    return {key: one.mean_s for key, one in found.items()}


def test_a_call_takes_as_long_as_it_took_the_rank_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(act: Callable[[], object]) -> float:
        act()
        return 1.0 if get_rank() == 1 else 6.0  # Rank 0 has waited for 5 seconds.

    monkeypatch.setattr(probe, "_seconds", seconds)
    assert ThreadRanks(2).run(usual, lambda: None) == [{("allreduce", 64): 1.0, ("sendrecv", 1024): 1.0}] * 2
    # Calls that follow each other at once: over all of them, no rank waits longer than another one.
    assert ThreadRanks(2).run(usual, None) == [{("allreduce", 64): 3.5, ("sendrecv", 1024): 3.5}] * 2


def in_turn(*seconds: float) -> Callable[[Callable[[], object]], float]:
    """Takes the place of the clock of calls: each rank sees ``seconds``, the first of them as it warms up."""
    left = {rank: list(seconds) for rank in range(2)}

    def measure(act: Callable[[], object]) -> float:
        act()
        return left[get_rank()].pop(0)

    return measure


def calls_of_nine() -> tuple[float, float]:
    communicator = get_default_group().global_communicator
    key = ("allreduce", 64)
    found = probe.usual_calls(communicator, {key: 9}, lambda: None)[key]
    return found.mean_s, found.median_s


def test_the_few_calls_that_take_long_count_as_steps_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # One call in three takes 4 s; in the last part one took a minute, while something else had the machine.
    monkeypatch.setattr(probe, "_seconds", in_turn(99.0, 1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 60.0, 1.0, 1.0))
    assert ThreadRanks(2).run(calls_of_nine) == [(2.0, 1.0)] * 2


def test_a_call_keeps_a_core_busy_for_a_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(
        _: object, wanted: dict[tuple[str, int], int], before: Callable[[], object], __: object
    ) -> dict[tuple[str, int], probe.UsualCall]:
        before()
        # Without a byte 4 s, 1 of which on a core; those of the largest call add 4 s, 2 of them on a core.
        small, large = probe.UsualCall(4.0, 3.0, 1.0), probe.UsualCall(9.0, 7.0, 3.0)
        return {key: small if key[1] == 64 else large for key in wanted}

    monkeypatch.setattr(probe, "usual_calls", usual)
    monkeypatch.setattr(probe, "usable_cores", lambda: 2)

    def facts(clock: Callable[[], float] | None) -> CallFacts:
        return probe.call_facts(get_default_group().global_communicator, clock)[0][0]

    seen = ThreadRanks(2).run(facts, lambda: 0.0)[0]
    assert (seen.message_s, seen.busy, seen.busy_bytes) == (2.0, 0.25, 0.5)
    assert [added_s for _, added_s in seen.points] == [4.0] * 3
    # Four ranks on two cores: none can have had more than a half. Without a clock, it had that.
    crowded = ThreadRanks(4).run(facts, None)[0]
    assert (crowded.busy, crowded.busy_bytes) == (0.5, 0.5)


def test_what_bytes_add_may_be_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(_: object, wanted: dict[tuple[str, int], int], *__: object) -> dict[tuple[str, int], probe.UsualCall]:
        return {key: probe.UsualCall(0.5, 0.1 if key[1] == 64 else 0.03, 0.0) for key in wanted}

    monkeypatch.setattr(lab_calls, "usual_calls", usual)
    for one in ThreadRanks(2).run(on_link, "1gbit")[0]:
        assert [added_s for _, added_s in one.points] == pytest.approx([-0.07] * 4)


def test_a_machine_is_measured_between_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_TELL_S", 0.0)
    said: list[str] = []
    found = probe_machine(cores=3, tell=said.append)
    assert said == [f"measured {number} of 64 calls" for number in range(64)]  # 4 kinds, 4 sizes, 1 + 3 rounds
    assert found.cores == 3
    assert found.after_calls >= 1.0
    assert [one.kind for one in found.calls] == KINDS
    assert all(one.message_s > 0 and len(one.points) == 3 for one in found.calls)
    assert found.ranks == 2
