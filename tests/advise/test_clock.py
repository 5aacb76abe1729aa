"""Time of a thread in which others had its core is no part of what is measured."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagua.advise import StepMeter, clock
from bagua.advise.rehearse import _Journal


class Queue:
    """Says how long the calling thread had no core."""

    def __init__(self) -> None:
        self.seconds = 0.0

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


def test_work_of_a_rehearsal_is_without_the_queue(queue: Queue) -> None:
    now = [0.0]
    journal = _Journal(clock=lambda: now[0])
    here = threading.get_ident()
    for at, queued in ((0.0, 5.0), (1.0, 5.0), (4.0, 7.0), (6.0, 7.0)):
        now[0], queue.seconds = at, queued
        journal.mark("arrival")
    assert journal.own_s(here, 1.0, 4.0) == 1.0  # 3 seconds, in 2 of which another thread had the core
    assert journal.own_s(here, 4.5, 6.0) == 1.5
    assert journal.own_s(here, 0.5, 4.0) == 1.5
