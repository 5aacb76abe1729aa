"""Time of a thread in which others had its core is no part of what is measured."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from bagua.advise import Message, Run, measure
from bagua.advise.rehearse import _Journal
from bagua.comm import Call, CallRecord, Place


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
