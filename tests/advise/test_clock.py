"""Time of a thread in which others had its core is no part of what is measured."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from bagua.advise import Message, Run, measure
from bagua.advise.rehearse import _Journal, _Reading
from bagua.comm import Call, CallRecord, Place


class Queue:
    """Says how long the calling thread had no core."""

    waited_s = 0.0

    def seconds(self) -> float:
        return self.waited_s


def test_the_clock_stands_in_the_queue_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_queue", Queue())
    monkeypatch.setattr(Queue, "waited_s", 3.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert measure.own_time() == 7.0


def test_a_forked_process_reads_of_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = measure._Queue()
    before = queue._descriptor
    monkeypatch.setattr(queue, "_process", -1)
    assert queue.seconds() >= 0.0
    assert queue._process == os.getpid()
    assert queue._descriptor != before
    os.close(before)


def test_a_system_that_does_not_count_takes_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_FILE", "/proc/there-is-no-such-file")
    assert measure._Queue().seconds() == 0.0


def test_every_thread_reads_its_own_queue() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(measure._queue._descriptor))
    thread.start()
    thread.join()
    assert found[0] != measure._queue._descriptor


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
