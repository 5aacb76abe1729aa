"""Groups of torch that several threads use, and signal handlers that communicate in the middle of a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from bagua.comm.communicator import Communicator
from bagua.comm.group import solo_group
from bagua.comm.lifetime import turns
from bagua.comm.torch_backend.group import TorchGroup
from bagua.comm.torch_backend.starter import CallStarter
from bagua.comm.transports.contract import Membership
from bagua.comm.transports.threads import Step, ThreadsTransport, inject_fault
from bagua.errors import ConcurrentUseError
from tests.comm.memory_ranks import run, values

pytestmark = pytest.mark.threads


def torch_group(comm: Communicator) -> TorchGroup:
    members = SimpleNamespace(global_communicator=comm, rank=comm.rank, size=comm.size, label="test")
    return TorchGroup(HashStore(), CallStarter(members, SimpleNamespace(timeout_s=10.0), {}))


def synchronous() -> Any:
    options = distributed_c10d.AllreduceOptions()
    options.asyncOp = False
    return options


def barrier(group: TorchGroup) -> None:
    options = distributed_c10d.BarrierOptions()
    options.asyncOp = False
    group.barrier(options).wait()


def when_inside(kind: str, function: Callable[[], object]) -> Callable[[Step], None]:
    """A fault hook that calls ``function`` when rank 0 has published a call of ``kind`` and does not yet wait."""

    def fault(step: Step) -> None:
        if (step.rank, step.call.kind, step.name) == (0, kind, "arrive"):
            function()

    return fault


def test_a_thread_sends_and_starts_a_collective_behind_the_one_that_another_waits_in() -> None:
    inside = threading.Event()

    def job(comm: Communicator) -> list[float]:
        group, first, second, message = torch_group(comm), torch.ones(1), torch.full((2,), 3.0), torch.zeros(1)
        if comm.rank == 0:
            thread = threading.Thread(target=group.allreduce, args=([first], synchronous()))
            thread.start()
            assert inside.wait(60)
            work = group.allreduce([second])
            assert not work.is_completed()
            group.send([message], 1).wait()
            work.wait()
            thread.join(60)
        else:
            group.recv([message], 0).wait()
            group.allreduce([first], synchronous())
            group.allreduce([second], synchronous())
        barrier(group)
        return [*first.tolist(), *second.tolist()]

    assert values(run(2, job, fault=when_inside("allreduce", inside.set))) == [[2, 6, 6]] * 2


def test_a_call_in_the_middle_of_another_of_the_same_thread_is_refused_at_once() -> None:
    groups: dict[int, TorchGroup] = {}
    errors: list[Exception] = []

    def interrupt() -> None:
        for call in (barrier, lambda group: group.barrier()):
            with pytest.raises(ConcurrentUseError, match="in the middle of another") as caught:
                call(groups[0])
            errors.append(caught.value)

    def job(comm: Communicator) -> float:
        groups[comm.rank] = torch_group(comm)
        groups[comm.rank].allreduce([summed := torch.ones(1)], synchronous())
        barrier(groups[comm.rank])
        assert comm.usable
        return summed.item()

    assert values(run(2, job, fault=when_inside("allreduce", interrupt))) == [2, 2]
    assert len(errors) == 2
    assert "barrier" in str(errors[0])


def test_a_signal_handler_communicates_while_the_main_thread_waits() -> None:
    """Its barrier is the one behind that of the main thread, as on torch's Gloo."""
    store, inside, handling, ended = HashStore(), threading.Event(), threading.Event(), []

    def rank(number: int) -> TorchGroup:
        with inject_fault(when_inside("barrier", inside.set)):
            return torch_group(Communicator(ThreadsTransport(Membership(store, number, (0, 1), (0, 0), 10.0)), 10.0))

    def other() -> None:
        group = rank(1)
        assert inside.wait(60)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert handling.wait(60)
        barrier(group)
        barrier(group)
        ended.append("other")

    def handle(*_: object) -> None:
        handling.set()
        barrier(group)
        ended.append("handler")

    thread = threading.Thread(target=other)
    thread.start()
    group = rank(0)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        barrier(group)
    finally:
        signal.signal(signal.SIGUSR1, before)
    thread.join(60)
    assert sorted(ended) == ["handler", "other"]


def test_who_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGPIPE: signal.SIG_IGN}
    monkeypatch.setattr(turns._signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    assert not turns.handlers_may_call()
    unhashable = SimpleNamespace(__call__=print)
    for handler in (print, unhashable):
        handlers[signal.SIGUSR1] = handler
        assert turns.handlers_may_call()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(turns.handlers_may_call()))
    thread.start()
    thread.join(60)
    assert answers == [False], "handlers run in the main thread"


def test_each_thread_collects_its_own_calls() -> None:
    group, cpu = (
        TorchGroup(HashStore(), CallStarter(solo_group(), SimpleNamespace(timeout_s=5.0), {})),
        torch.device("cpu"),
    )
    group._start_coalescing(cpu)
    thread = threading.Thread(target=group.allreduce, args=([torch.ones(1)],))
    thread.start()
    thread.join(60)
    assert group._end_coalescing(cpu).pending is None
    group._start_coalescing(cpu)
    group.allreduce([torch.ones(1)])
    assert group._end_coalescing(cpu).pending is not None
