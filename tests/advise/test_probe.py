"""Probes: what is measured of calls, and how often."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from bagua.advise import CallFacts, Cluster, link_facts, probe, probe_machine
from bagua.comm import get_default_group, get_rank
from bagua.link import parse_link
from bagua.testing import ThreadRanks

KINDS = ["allreduce", "allgather", "alltoall", "sendrecv"]
MEGA = 1024.0 * 1024


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_ROUNDS", 3)


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


def test_a_call_takes_as_long_as_it_took_the_rank_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(act: Callable[[], object]) -> float:
        act()
        return 1.0 if get_rank() == 1 else 6.0  # Rank 0 has waited for 5 seconds.

    monkeypatch.setattr(probe, "_seconds", seconds)

    def usual(before: Callable[[], object] | None) -> dict[tuple[str, int], float]:
        wanted = {("allreduce", 64): 3, ("sendrecv", 1024): 1, ("alltoall", 64): 0}
        communicator = get_default_group().global_communicator
        return probe._usual_s(lambda: contextlib.nullcontext(communicator), wanted, before)

    assert ThreadRanks(2).run(usual, lambda: None) == [{("allreduce", 64): 1.0, ("sendrecv", 1024): 1.0}] * 2
    # Calls that follow each other at once: over all of them, no rank waits longer than another one.
    assert ThreadRanks(2).run(usual, None) == [{("allreduce", 64): 3.5, ("sendrecv", 1024): 3.5}] * 2


def test_what_bytes_add_may_be_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_usual_s", lambda _, wanted, __: {key: 0.1 if key[1] == 64 else 0.03 for key in wanted})
    for one in ThreadRanks(2).run(on_link, "1gbit")[0]:
        assert [added_s for _, added_s in one.points] == pytest.approx([-0.07] * 4)


def test_a_machine_is_measured_between_two_threads() -> None:
    found = probe_machine(cores=3)
    assert found.cores == 3
    assert found.after_calls >= 1.0
    assert [one.kind for one in found.calls] == KINDS
    assert all(one.message_s > 0 and len(one.points) == 3 for one in found.calls)
