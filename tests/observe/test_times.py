"""The parts of a call's time add up, whoever makes it and whoever waits; clocks are injected."""

import contextlib
import os
from unittest.mock import Mock

import pytest
import torch

import bagua.comm
from bagua.comm import Call, CallTimes, Place, Recorder, in_background
from bagua.comm.records import recorder as records
from bagua.comm.records.recorder import LATEST_LENGTH, KindStatistics, Statistics
from bagua.errors import CommunicationError
from tests.harness import until


@pytest.fixture
def clock() -> Mock:
    return Mock(return_value=100.0)


@pytest.fixture
def statistics(clock: Mock) -> Statistics:
    return Statistics(Place("world", "threads", 0, (0, 1, 2)), Recorder(clock))


def call(number: int, kind: str = "allreduce") -> Call:
    return Call(kind, torch.float32, 4, "sum", sequence=number)


def parts(times: CallTimes) -> tuple[float, float, float]:
    return times.exposed_s, times.hidden_s, times.waiting_s


def test_a_call_that_the_code_that_computes_makes_and_waits_for_is_exposed_but_for_the_waiting(clock, statistics):
    record = statistics.begin(call(1), clock())
    record.waited_s, record.waited_for = 3.0, (2,)
    statistics.end(record, clock() + 5.0, blocked_s=5.0)
    assert parts(statistics.times) == (2.0, 0.0, 3.0)
    assert statistics.waits == {2: 3.0}


def test_who_comes_last_is_late_only_if_that_matters(clock, statistics):
    # Of ten seconds from call to call; there is none before the first.
    for number, waited_s in enumerate((1.0, 0.3, 0.001, 0.4), 1):
        clock.return_value += 9.0
        record = statistics.begin(call(number), clock())
        record.waited_s, record.waited_for = waited_s, (1, 2)
        clock.return_value += 1.0
        statistics.end(record, clock(), blocked_s=1.0)
    assert statistics.lasts == {1: 1.0, 2: 1.0}
    statistics.recorder.retire(statistics)
    assert statistics.recorder.lasts() == {1: 1.0, 2: 1.0}


def test_calls_between_two_ranks_are_no_collectives(clock, statistics):
    for kind in ("allreduce", "send"):
        record = statistics.begin(call(1, kind), clock())
        clock.return_value += 2.0
        statistics.end(record, clock(), blocked_s=2.0)
    assert statistics.times == CallTimes(4.0, 4.0, 0.0, 2.0, 2)


def test_what_goes_on_beside_computing_is_hidden(clock, statistics):
    record = statistics.begin(call(1), clock())
    record.waited_s = 3.0
    # It ends after 8 seconds. The caller came back to it after 5.
    statistics.end(record, clock() + 8.0, blocked_s=3.0)
    assert parts(statistics.times) == (3.0, 2.0, 3.0)


def test_calls_that_overlap_are_counted_once(clock, statistics):
    first, second = statistics.begin(call(1), 100.0), statistics.begin(call(2), 101.0)
    statistics.end(first, 104.0, blocked_s=0.0)
    statistics.end(second, 106.0, blocked_s=1.0)
    assert (statistics.times.time_s, *parts(statistics.times)) == (6.0, 1.0, 5.0, 0.0)


def test_a_call_of_a_background_thread_is_exposed_while_the_code_that_computes_waits_for_it(clock, statistics):
    recorder = statistics.recorder
    with in_background():
        record = statistics.begin(call(1), clock())
    clock.return_value += 4.0  # computing

    def wait() -> None:
        clock.return_value += 2.0
        statistics.end(record, clock(), blocked_s=6.0)
        clock.return_value += 1.0

    recorder.while_blocked(wait)
    assert parts(statistics.times) == (2.0, 4.0, 0.0)
    assert recorder.blocked_s(clock()) == 3.0


def test_the_parts_of_many_calls_add_up_to_the_time_that_was_measured(clock, statistics):
    generator = torch.Generator().manual_seed(0)
    measured, busy_until = 0.0, 0.0
    for number in range(200):
        gap, took, waited, blocked = torch.rand(4, generator=generator, dtype=torch.float64).tolist()
        clock.return_value += gap
        record = statistics.begin(call(number + 1), clock())
        record.waited_s = waited * took
        ended = clock() + took
        measured += max(ended - max(clock(), busy_until), 0.0)
        busy_until = max(busy_until, ended)
        statistics.end(record, ended, blocked_s=blocked * took)
    assert min(parts(statistics.times)) > 0
    assert sum(parts(statistics.times)) == pytest.approx(measured, rel=1e-9)
    assert len(statistics.recent) == 64


def fail_unattended(checked: bool) -> str:
    """What the record says of a call that fails while nobody waits for it."""
    group = bagua.comm.get_default_group()
    if checked and group.backend == "gloo":  # Other transports compare calls anyway.
        os.environ["BAGUA_DEBUG"] = "1"
    try:
        communicator = group.duplicate().global_communicator
    finally:
        os.environ.pop("BAGUA_DEBUG", None)
    if group.rank == 1:
        bagua.comm.barrier()
        communicator.abort("enough")
        return "failed"
    work = communicator.allreduce(torch.ones(3), async_op=True)
    bagua.comm.barrier()
    until(work.is_completed)
    with contextlib.suppress(CommunicationError):
        communicator.barrier()
    return communicator.statistics.recent[0].state


@pytest.mark.parametrize("checked", [False, True])
def test_a_call_that_fails_while_nobody_waits_is_no_complete_one(ranks, checked) -> None:
    assert ranks(2, fail_unattended, checked) == ["failed"] * 2


def test_a_call_that_ends_while_its_communicator_is_closed_is_counted(clock, statistics):
    """Another thread may have met the end of the call, and count it a moment later."""
    recorder = statistics.recorder
    record = statistics.begin(call(1), clock())
    record.waited_s, record.waited_for = 3.0, (2,)
    recorder.retire(statistics)
    statistics.end(record, clock() + 5.0, blocked_s=5.0)
    assert recorder.times() == CallTimes(5.0, 2.0, 3.0, 5.0, 1)
    assert (recorder.waits(), recorder.lasts()) == ({2: 3.0}, {2: 1.0})
    assert recorder.sent_bytes() == statistics.sent_bytes() > 0
    assert recorder.totals()["allreduce"].calls == 1


def test_totals_that_are_read_while_a_call_is_counted_have_all_of_it_or_nothing(statistics, monkeypatch):
    sent, readings = records.sent_by, []

    def asking(*arguments):
        readings.append(statistics.kinds)
        return sent(*arguments)

    monkeypatch.setattr(records, "sent_by", asking)
    message = Call("send", torch.float32, 5, root=1)
    for count in (1, 2):
        statistics.end(statistics.begin(message, 0.0), 0.0, blocked_s=0.0, spent_s=1.0)
        assert statistics.kinds == {"send": KindStatistics(count, 20 * count, 20 * count, float(count))}
    assert readings == [{}, {"send": KindStatistics(1, 20, 20, 1.0)}]


def test_what_is_read_while_a_communicator_is_closed_counts_it_once(clock, statistics):
    recorder, readings, retiring = statistics.recorder, [], []

    class Asking(Statistics):
        """Has the sums of all read where retiring reads its own."""

        __slots__ = ()

        @property
        def times(self) -> CallTimes:
            if retiring:
                retiring.clear()
                readings.append(recorder.times().calls - count)
            return Statistics.times.fget(self)

    for count in range(1, 41):
        asking = Asking(statistics.place, recorder)
        asking.end(asking.begin(call(count), clock()), clock() + 1.0, blocked_s=1.0)
        retiring.append(True)
        recorder.retire(asking)
        retiring.clear()
    assert recorder.times() == CallTimes(40.0, 40.0, 0.0, 40.0, 40)
    assert recorder.open == (statistics,)
    assert set(readings) == {0}
    assert len(recorder._books.latest) == LATEST_LENGTH, "what was closed long ago is kept as sums only"
