"""What is measured of calls, of a thread, and of the engine on a group of which one rank is there."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from bagua import advise
from bagua.advise import CallFacts, Cluster, MachineFacts, Message, ModelFacts, ParameterFacts, Rehearsal, Run
from bagua.advise.rehearse import _Journal
from bagua.algorithms import Add, Algorithm, Every, Exchange, Mean, Parts, Weights, registry
from bagua.comm import Call, CallRecord, Place, get_default_group, get_rank
from bagua.errors import ConfigurationError
from bagua.link import parse_link
from bagua.testing import ThreadRanks
from benchmarks import lab_calls
from benchmarks.lab_calls import link_facts
from tests.contract.exercises import communicator
from tests.harness import in_threads

Wanted = dict[tuple[str, int], int]
Usual = dict[tuple[str, int], advise.measure.UsualCall]
KINDS = ["allreduce", "allgather", "alltoall", "sendrecv"]
MEGA = 1024.0 * 1024


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((advise.measure, "_ROUNDS"), (advise.measure, "_SMALL_ROUNDS"), (lab_calls, "_MOST_ROUNDS")):
        monkeypatch.setattr(module, name, 3)


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
    found = advise.measure.usual_calls(communicator(), wanted, before)
    return {key: one.mean_s for key, one in found.items()}


def test_a_call_takes_as_long_as_it_took_the_rank_that_came_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(act: Callable[[], object]) -> float:
        act()
        return 1.0 if get_rank() == 1 else 6.0  # Rank 0 has waited for 5 seconds.

    monkeypatch.setattr(advise.measure, "_seconds", seconds)
    assert ThreadRanks(2).run(usual, lambda: None) == [{("allreduce", 64): 1.0, ("sendrecv", 1024): 1.0}] * 2
    # Calls that follow each other at once: over all of them, no rank waits longer than another one.
    assert ThreadRanks(2).run(usual, None) == [{("allreduce", 64): 3.5, ("sendrecv", 1024): 3.5}] * 2


def test_the_few_calls_that_take_long_count_as_steps_count_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # One call in three takes 4 s; in the last part one took a minute, while something else had the machine. The first
    # warms up.
    left = {rank: [99.0, 1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 60.0, 1.0, 1.0] for rank in range(2)}
    key = ("allreduce", 64)

    def seconds(act: Callable[[], object]) -> float:
        act()
        return left[get_rank()].pop(0)

    monkeypatch.setattr(advise.measure, "_seconds", seconds)
    for found in ThreadRanks(2).run(lambda: advise.measure.usual_calls(communicator(), {key: 9}, lambda: None)[key]):
        assert (found.mean_s, found.median_s) == (2.0, 1.0)


def test_a_call_keeps_a_core_busy_for_a_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(_: object, wanted: Wanted, before: Callable[[], object], __: object) -> Usual:
        before()
        # Without a byte 4 s, 1 of which on a core; those of the largest call add 4 s, 2 of them on a core.
        small, large = advise.measure.UsualCall(4.0, 3.0, 1.0), advise.measure.UsualCall(9.0, 7.0, 3.0)
        return {key: small if key[1] == 64 else large for key in wanted}

    monkeypatch.setattr(advise.measure, "usual_calls", usual)
    monkeypatch.setattr(advise.measure, "usable_cores", lambda: 2)

    seen = ThreadRanks(2).run(lambda: advise.measure.call_facts(communicator(), lambda: 0.0))[0][0][0]
    assert (seen.message_s, seen.busy, seen.busy_bytes) == (2.0, 0.25, 0.5)
    assert [added_s for _, added_s in seen.points] == [4.0] * 3
    # Four ranks on two cores: none can have had more than a half. Without a clock, it had that.
    crowded = ThreadRanks(4).run(lambda: advise.measure.call_facts(communicator(), None))[0][0][0]
    assert (crowded.busy, crowded.busy_bytes) == (0.5, 0.5)


def test_what_bytes_add_may_be_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def usual(_: object, wanted: Wanted, *__: object) -> Usual:
        return {key: advise.measure.UsualCall(0.5, 0.1 if key[1] == 64 else 0.03, 0.0) for key in wanted}

    monkeypatch.setattr(lab_calls, "usual_calls", usual)
    for one in ThreadRanks(2).run(on_link, "1gbit")[0]:
        assert [added_s for _, added_s in one.points] == pytest.approx([-0.07] * 4)


def test_a_machine_is_measured_between_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise.measure, "_TELL_S", 0.0)
    said: list[str] = []
    found = advise.probe_machine(cores=3, tell=said.append)
    assert said == [f"measured {number} of 64 calls" for number in range(64)]  # 4 kinds, 4 sizes, 1 + 3 rounds
    assert (found.cores, found.ranks) == (3, 2)
    assert found.after_calls >= 1.0
    assert [(one.kind, len(one.points)) for one in found.calls] == [(kind, 3) for kind in KINDS]
    assert all(one.message_s > 0 for one in found.calls)


def test_the_clock_stands_in_the_queue_of_a_core_where_the_system_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"5000000000 3000000000 7\n")
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert advise.measure.own_time() == 7.0
    monkeypatch.setattr(advise.measure, "_own", threading.local())
    monkeypatch.setattr(advise.measure, "_FILE", "/proc/there-is-no-such-file")
    assert advise.measure.own_time() == 10.0


def test_every_thread_reads_its_own_queue_also_in_a_forked_process() -> None:
    def reads_its_own(_: object = None) -> bool:
        advise.measure.own_time()
        path = f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat"
        return os.readlink(f"/proc/self/fd/{advise.measure._own.queue.descriptor}") == path

    assert [reads_its_own(), *in_threads(1, reads_its_own)] == [True, True]
    child = os.fork()
    if not child:
        os._exit(not reads_its_own())
    assert os.waitpid(child, 0)[1] == 0


def test_no_file_of_a_thread_that_has_ended_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(8):
        in_threads(1, lambda _: advise.measure.own_time())
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_work_of_a_rehearsal_is_what_kept_its_thread_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = _Journal([0, 1])

    def come(at: float, busy_s: float) -> None:
        monkeypatch.setattr(time, "perf_counter", lambda: at)
        monkeypatch.setattr(time, "thread_time", lambda: busy_s)

    place = Place("model0", "rehearsal", 0, (0, 1))
    record = CallRecord(Call("alltoall", torch.uint8, 500), place, 0, 4.0)
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
PARAMETERS = tuple(ParameterFacts(f"p{n}", shape, "float32", 0.01 * (n + 1)) for n, shape in enumerate(SHAPES))
FACTS = ModelFacts(PARAMETERS, (0.05, 0.05, 0.06))


def rehearsed(name: str, hosts: int = 4, per_host: int = 1, **options: object) -> Rehearsal:
    return advise.rehearse(Algorithm.init(name, **options), FACTS, [per_host] * hosts, name=name)


def kinds(rehearsal: Rehearsal) -> list[list[str]]:
    return [[message.kind for message in run.messages] for run in rehearsal.runs]


def test_every_step_brings_all_gradients_in_their_order_and_sends_them_whole_or_as_the_exchange_says() -> None:
    exact = rehearsed("gradient_allreduce")
    for step in exact.steps:
        assert [one.number for one in step if one.what == "arrival"] == [0, 1, 2, 3]
        assert [one.what for one in step if one.what in ("start", "wait")] == ["start", "wait"]
    assert kinds(exact) == [["allreduce"]] * len(exact.steps)
    assert exact.sent_bytes == pytest.approx(BYTES, rel=0.01)
    packed = rehearsed("bytegrad")
    assert kinds(packed) == [["alltoall", "allgather"]] * len(packed.steps)
    # A byte for each element, to all together, and all from all.
    for message in packed.runs[0].messages:
        assert BYTES / 4 < message.nbytes < BYTES / 4 * 1.1


def test_what_another_lane_sends_meanwhile_is_its_own() -> None:
    found = advise.rehearse(Algorithm.init("bytegrad"), FACTS, [1, 1], bucket_bytes=8192)
    assert len({run.lane for run in found.runs}) == 2
    assert kinds(found) == [["alltoall", "allgather"]] * len(found.runs)


def test_hosts_are_told_apart() -> None:
    found = rehearsed("gradient_allreduce", hosts=3, per_host=2, hierarchical=True)
    assert {(one.ranks, one.hosts) for run in found.runs for one in run.messages} >= {(2, 1), (3, 3)}


def test_a_period_is_as_long_as_the_exchange_says() -> None:
    found = rehearsed("local_sgd", sync_every=6)
    assert (len(found.steps), found.steps_alone, found.keeps_equal) == (6, 6, False)
    assert [sum(one.what == "start" for one in step) for step in found.steps].count(1) == 1


def test_what_is_folded_a_period_later_is_waited_for_there() -> None:
    lagging = Algorithm.of(Exchange(Weights(), Every(2), Mean(), Add(), lag=2, parts=Parts(1, "strided")))
    found = advise.rehearse(lagging, FACTS, [1, 1])
    assert [one.periods_ago for step in found.steps for one in step if one.what == "wait"] == [1]


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
    few_s, many_s = (
        advise.predict(one, facts, Cluster(hosts, 1, parse_link("unlimited")), free).step_s
        for hosts, one in ((2, few), (10_000, many))
    )
    assert 0.05 <= few_s < 0.075
    assert many_s == pytest.approx(0.10, rel=0.1)


def test_neighbours_are_few() -> None:
    assert [rehearsed(name).meeting for name in ("low_precision_decentralized", "gradient_allreduce")] == [2, 4]


@pytest.mark.parametrize("name", list(registry))
def test_each_registered_algorithm_is_predicted_or_refused(name: str) -> None:
    algorithm = Algorithm.init(name)
    if algorithm.in_background:
        with pytest.raises(ConfigurationError, match="own pace"):
            advise.rehearse(algorithm, FACTS, [1, 1])
        return
    found = advise.rehearse(algorithm, FACTS, [1, 1], name=name)
    clusters = (Cluster(2, 1, parse_link(link)) for link in ("1mbit", "10gbit"))
    slow, fast = (advise.predict(found, FACTS, there, MachineFacts(cores=8)).step_s for there in clusters)
    assert FACTS.step_s < fast < slow


def test_shares_of_unequal_size_are_rehearsed_with_a_model_that_divides() -> None:
    assert all(run.messages for run in rehearsed("top_k", hosts=12, warmup_steps=0).runs)


def test_a_rehearsal_leaves_nothing_behind() -> None:
    before = threading.active_count()
    rehearsed("bytegrad")
    assert threading.active_count() <= before + 1  # the thread that closes groups
