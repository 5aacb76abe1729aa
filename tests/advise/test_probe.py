"""What is measured of calls, of a thread, and of the engine on a group of which one rank is there."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from bagua.advise import (
    CallFacts,
    Cluster,
    MachineFacts,
    Message,
    ModelFacts,
    ParameterFacts,
    Rehearsal,
    Run,
    measure,
    predict,
    probe_machine,
    rehearse,
)
from bagua.advise.rehearse import _Journal
from bagua.algorithms import Add, Algorithm, Every, Exchange, Mean, Parts, Weights, registry
from bagua.comm import Call, CallRecord, Place, get_default_group, get_rank
from bagua.errors import ConfigurationError
from bagua.link import parse_link
from bagua.testing import ThreadRanks
from benchmarks import lab_calls
from benchmarks.lab_calls import link_facts

KINDS = ["allreduce", "allgather", "alltoall", "sendrecv"]
MEGA = 1024.0 * 1024


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_ROUNDS", 3)
    monkeypatch.setattr(measure, "_SMALL_ROUNDS", 3)
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
    found = measure.usual_calls(communicator, wanted, before)
    return {key: one.mean_s for key, one in found.items()}


def test_a_call_takes_as_long_as_it_took_the_rank_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(act: Callable[[], object]) -> float:
        act()
        return 1.0 if get_rank() == 1 else 6.0  # Rank 0 has waited for 5 seconds.

    monkeypatch.setattr(measure, "_seconds", seconds)
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
    found = measure.usual_calls(communicator, {key: 9}, lambda: None)[key]
    return found.mean_s, found.median_s


def test_the_few_calls_that_take_long_count_as_steps_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # One call in three takes 4 s; in the last part one took a minute, while something else had the machine.
    monkeypatch.setattr(measure, "_seconds", in_turn(99.0, 1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 60.0, 1.0, 1.0))
    assert ThreadRanks(2).run(calls_of_nine) == [(2.0, 1.0)] * 2


def test_a_call_keeps_a_core_busy_for_a_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(
        _: object, wanted: dict[tuple[str, int], int], before: Callable[[], object], __: object
    ) -> dict[tuple[str, int], measure.UsualCall]:
        before()
        # Without a byte 4 s, 1 of which on a core; those of the largest call add 4 s, 2 of them on a core.
        small, large = measure.UsualCall(4.0, 3.0, 1.0), measure.UsualCall(9.0, 7.0, 3.0)
        return {key: small if key[1] == 64 else large for key in wanted}

    monkeypatch.setattr(measure, "usual_calls", usual)
    monkeypatch.setattr(measure, "usable_cores", lambda: 2)

    def facts(clock: Callable[[], float] | None) -> CallFacts:
        return measure.call_facts(get_default_group().global_communicator, clock)[0][0]

    seen = ThreadRanks(2).run(facts, lambda: 0.0)[0]
    assert (seen.message_s, seen.busy, seen.busy_bytes) == (2.0, 0.25, 0.5)
    assert [added_s for _, added_s in seen.points] == [4.0] * 3
    # Four ranks on two cores: none can have had more than a half. Without a clock, it had that.
    crowded = ThreadRanks(4).run(facts, None)[0]
    assert (crowded.busy, crowded.busy_bytes) == (0.5, 0.5)


def test_what_bytes_add_may_be_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(_: object, wanted: dict[tuple[str, int], int], *__: object) -> dict[tuple[str, int], measure.UsualCall]:
        return {key: measure.UsualCall(0.5, 0.1 if key[1] == 64 else 0.03, 0.0) for key in wanted}

    monkeypatch.setattr(lab_calls, "usual_calls", usual)
    for one in ThreadRanks(2).run(on_link, "1gbit")[0]:
        assert [added_s for _, added_s in one.points] == pytest.approx([-0.07] * 4)


def test_a_machine_is_measured_between_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_TELL_S", 0.0)
    said: list[str] = []
    found = probe_machine(cores=3, tell=said.append)
    assert said == [f"measured {number} of 64 calls" for number in range(64)]  # 4 kinds, 4 sizes, 1 + 3 rounds
    assert found.cores == 3
    assert found.after_calls >= 1.0
    assert [one.kind for one in found.calls] == KINDS
    assert all(one.message_s > 0 and len(one.points) == 3 for one in found.calls)
    assert found.ranks == 2


def test_the_clock_stands_in_the_queue_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"5000000000 3000000000 7\n")
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert measure.own_time() == 7.0


def test_a_system_that_does_not_count_takes_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_own", threading.local())
    monkeypatch.setattr(measure, "_FILE", "/proc/there-is-no-such-file")
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert measure.own_time() == 10.0


def test_every_thread_reads_its_own_queue_also_in_a_forked_process() -> None:
    def read() -> str:
        measure.own_time()
        return os.readlink(f"/proc/self/fd/{measure._own.queue.descriptor}")

    def own() -> str:
        return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat"

    found: list[bool] = [read() == own()]
    thread = threading.Thread(target=lambda: found.append(read() == own()))
    thread.start()
    thread.join()
    child = os.fork()
    if not child:
        os._exit(read() != own())
    assert os.waitpid(child, 0)[1] == 0
    assert found == [True, True]


def test_no_file_of_a_thread_that_has_ended_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        thread = threading.Thread(target=measure.own_time)
        thread.start()
        thread.join()
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_work_of_a_rehearsal_is_what_kept_its_thread_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = _Journal([0, 1])

    def come(at: float, busy_s: float) -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: at)
        monkeypatch.setattr(time, "thread_time", lambda: busy_s)

    place = Place("model0", "rehearsal", 0, (0, 1))
    record = CallRecord(Call("alltoall", 1, torch.uint8, 500), place, 0, 4.0)
    come(0.0, 10.0)
    journal.mark("begins")
    journal.mark("begins")
    come(4.5, 12.5)  # 2 seconds of work in 4, and a call that took half a second
    record.ended = 4.5
    journal.call(record)
    come(9.0, 13.5)
    journal.span("run mean of bucket 0", 0.5, 9.0, {"track": "work", "group": "model0"})
    come(9.0, 14.0)
    journal.span("mean of bucket 0", 0.4, 9.0, {"track": "exchanges"})
    _, runs, blocked_s = journal.read(1)
    assert runs == (Run((2.0, Message("alltoall", 1000.0, 2, 2), 1.0)),)
    assert blocked_s == 3.5


SHAPES = ((64,), (64, 128), (128,), (128, 64))
BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
FACTS = ModelFacts(
    tuple(ParameterFacts(f"p{n}", shape, "float32", 0.01 * (n + 1)) for n, shape in enumerate(SHAPES)),
    (0.05, 0.05, 0.06),
)


def rehearsed(name: str, hosts: int = 4, per_host: int = 1, **options: object) -> Rehearsal:
    return rehearse(Algorithm.init(name, **options), FACTS, [per_host] * hosts, name=name)


def kinds(rehearsal: Rehearsal) -> list[list[str]]:
    return [[message.kind for message in run.messages] for run in rehearsal.runs]


def test_every_step_brings_all_gradients_in_their_order() -> None:
    found = rehearsed("gradient_allreduce")
    for step in found.steps:
        assert [one.number for one in step if one.what == "arrival"] == [0, 1, 2, 3]
        assert [one.what for one in step if one.what in ("start", "wait")] == ["start", "wait"]


def test_gradients_are_sent_whole_or_as_the_exchange_says() -> None:
    exact = rehearsed("gradient_allreduce")
    assert kinds(exact) == [["allreduce"]] * len(exact.steps)
    assert exact.sent_bytes == pytest.approx(BYTES, rel=0.01)
    packed = rehearsed("bytegrad")
    assert kinds(packed) == [["alltoall", "allgather"]] * len(packed.steps)
    # A byte for each element, to all together, and all from all.
    for message in packed.runs[0].messages:
        assert BYTES / 4 < message.nbytes < BYTES / 4 * 1.1


def test_what_another_lane_sends_meanwhile_is_its_own() -> None:
    found = rehearse(Algorithm.init("bytegrad"), FACTS, [1, 1], bucket_bytes=8192)
    assert len({run.lane for run in found.runs}) == 2
    assert kinds(found) == [["alltoall", "allgather"]] * len(found.runs)


def test_hosts_are_told_apart() -> None:
    found = rehearsed("gradient_allreduce", hosts=3, per_host=2, hierarchical=True)
    assert {(one.ranks, one.hosts) for run in found.runs for one in run.messages} >= {(2, 1), (3, 3)}


def test_a_period_is_as_long_as_the_exchange_says() -> None:
    found = rehearsed("local_sgd", sync_every=6)
    assert len(found.steps) == 6
    assert [sum(one.what == "start" for one in step) for step in found.steps].count(1) == 1
    assert found.steps_alone == 6
    assert not found.keeps_equal


def test_what_is_folded_a_period_later_is_waited_for_there() -> None:
    lagging = Algorithm.of(Exchange(Weights(), Every(2), Mean(), Add(), lag=2, parts=Parts(1, "strided")))
    found = rehearse(lagging, FACTS, [1, 1])
    waits = [one for step in found.steps for one in step if one.what == "wait"]
    assert [one.periods_ago for one in waits] == [1]


def calls_alone(found: Rehearsal) -> Rehearsal:
    """Without the work around them, whose time differs from one rehearsal to the next."""
    return dataclasses.replace(found, runs=tuple(Run(run.messages, run.lane) for run in found.runs), extra_s=0.0)


def test_the_slowest_of_those_who_meet_sets_the_pace() -> None:
    # One step in ten takes twice as long: of two ranks one is late in every fifth step, of 10,000 in each.
    facts = dataclasses.replace(FACTS, steps_s=(*[0.05] * 9, 0.10))
    free = MachineFacts(message_s=0.0, byte_s=0.0, cores=8)
    few, some = (calls_alone(rehearsed("gradient_allreduce", hosts=hosts)) for hosts in (2, 4))
    messages = (dataclasses.replace(message, ranks=10_000, hosts=10_000) for message in some.runs[0].messages)
    many = dataclasses.replace(some, runs=(Run(tuple(messages)), *some.runs[1:]))
    pace = {
        hosts: predict(one, facts, Cluster(hosts, 1, parse_link("unlimited")), free).step_s
        for hosts, one in ((2, few), (10_000, many))
    }
    assert 0.05 <= pace[2] < 0.075
    assert pace[10_000] == pytest.approx(0.10, rel=0.1)


def test_neighbours_are_few() -> None:
    assert rehearsed("low_precision_decentralized").meeting == 2
    assert rehearsed("gradient_allreduce").meeting == 4


@pytest.mark.parametrize("name", list(registry))
def test_each_registered_algorithm_is_predicted_or_refused(name: str) -> None:
    algorithm = Algorithm.init(name)
    if algorithm.in_background:
        with pytest.raises(ConfigurationError, match="own pace"):
            rehearse(algorithm, FACTS, [1, 1])
        return
    found = rehearse(algorithm, FACTS, [1, 1], name=name)
    slow, fast = (
        predict(found, FACTS, Cluster(2, 1, parse_link(link)), MachineFacts(cores=8)).step_s
        for link in ("1mbit", "10gbit")
    )
    assert FACTS.step_s < fast < slow


def test_shares_of_unequal_size_are_rehearsed_with_a_model_that_divides() -> None:
    found = rehearsed("top_k", hosts=12, warmup_steps=0)
    assert all(run.messages for run in found.runs)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    import threading

    before = threading.active_count()
    rehearsed("bytegrad")
    assert threading.active_count() <= before + 1  # the thread that closes groups
