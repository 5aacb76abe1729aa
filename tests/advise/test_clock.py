"""Time of a thread in which others had its core is no part of what is measured."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagua.advise import Message, Run, StepMeter
from bagua.advise import measure as clock
from bagua.advise.rehearse import _Journal, _Reading
from bagua.comm import Call, CallRecord, Place


class Queue:
    """Says how long the calling thread had no core."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.of_parent = False

    def read(self) -> tuple[float, float]:
        return 1.0, self.seconds


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr(clock._own, "statistics", found)
    return found


def test_the_clock_stands_in_the_queue_of_a_core(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    queue.seconds = 3.0
    assert clock.own_time() == 7.0


def test_a_forked_process_reads_of_its_own_thread(queue: Queue) -> None:
    queue.seconds, queue.of_parent = 1e9, True
    assert clock.queued_s() < 1e9
    assert clock._own.statistics is not queue


def test_a_system_that_does_not_count_takes_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_FILE", "/proc/there-is-no-such-file")
    monkeypatch.setattr(clock._own, "statistics", clock._Statistics())
    assert clock.queued_s() == 0.0
    assert not clock.sees_queues()


def test_every_thread_reads_its_own_queue() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(clock._own.statistics))
    thread.start()
    thread.join()
    assert found[0] is not clock._own.statistics


@pytest.mark.parametrize(("counted", "copies"), [(True, 1), (False, 4)])
def test_ranks_beside_it_do_not_matter_where_their_time_is_left_out(
    counted: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bagua.advise.measure.sees_queues", lambda: counted)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StepMeter(model, [optimizer])
    for _ in range(8):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    meter.end()
    assert meter.facts(4).copies == copies


def test_work_of_a_rehearsal_is_what_kept_its_thread_busy() -> None:
    now, busy = [0.0], [0.0]
    journal = _Journal(lambda: now[0], lambda: busy[0])

    def come(at: float, busy_s: float) -> None:
        now[0], busy[0] = at, busy_s

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
    found = _Reading(journal, 1, [0, 1])
    assert found.runs == (Run((2.0, Message("alltoall", 1000.0, 2, 2), 1.0)),)
    assert found.blocked_s == 3.5
