"""The path of every call, what it costs, and groups that several threads and signal handlers use."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from bagua import errors
from bagua.comm import DONE, Communicator, Handle, Membership, Place, ReduceOp, Transport, solo_group, thread_store
from bagua.comm.call import COLLECTIVES, POINT_TO_POINT, Call
from bagua.comm.lifetime import background as turns
from bagua.comm.pipeline import CallPipeline
from bagua.comm.records.recorder import Statistics
from bagua.comm.torch_backend.group import TorchGroup
from bagua.comm.torch_backend.starter import CallStarter, Connected
from bagua.comm.transports.shm.transport import ShmTransport, shm_refusal
from bagua.comm.transports.threads import Step, ThreadsTransport, inject_fault
from tests.comm.memory_ranks import membership, on_communicators, run, values
from tests.harness import in_threads


class Scripted(Transport):
    """Notes its calls; `then` is what becomes of each: a handle, or an error."""

    name = "scripted"

    def __init__(self):
        super().__init__(Membership(thread_store(), 0, (0, 1, 2), (0, 0, 0), 9.0, "test"))
        self.calls, self.tensors, self.aborts, self.closed, self.then = [], [], [], 0, DONE

    def start(self, call, source, target, timeout_s, asynchronous):
        self.calls.append((call, timeout_s, asynchronous))
        self.tensors.append((source, target))
        if isinstance(self.then, Exception):
            raise self.then
        return self.then

    def abort(self, reason, culprit=None):
        self.aborts.append((reason, culprit))

    def close(self):
        self.closed += 1


transport = pytest.fixture(lambda: Scripted())  # noqa: PLW0108 - pytest calls no classes
comm = pytest.fixture(lambda transport: Communicator(transport, 9.0))


def test_a_call_is_described_to_the_transport(comm, transport):
    comm.allreduce(torch.ones(2, 3))
    comm.reduce(torch.ones(4, dtype=torch.int64), 2, timeout=1.5)
    comm.send(torch.ones(1), 1, async_op=True)
    comm.barrier()
    described = [(str(call), timeout_s, asynchronous) for call, timeout_s, asynchronous in transport.calls]
    assert described == [
        ("#1 allreduce(6 x float32, sum)", 9.0, False),
        ("#2 reduce(4 x int64, sum, root 2)", 1.5, False),
        ("#1 send(1 x float32, peer 1)", 9.0, True),
        ("#3 barrier()", 9.0, False),
    ]
    assert comm.history() == tuple(text for text, _, _ in described)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_in_place_has_one_tensor(comm, transport, asynchronous):
    tensor = torch.ones(3, requires_grad=asynchronous)
    comm.allreduce(tensor, async_op=asynchronous)
    comm.broadcast(tensor, 0, async_op=asynchronous)
    for source, target in transport.tensors:
        assert source is target
        assert source.data_ptr() == tensor.data_ptr()
        assert not source.requires_grad


def test_an_error_of_the_transport_gets_its_facts_and_breaks_the_communicator(comm, transport):
    comm.barrier()
    transport.then = errors.CollectiveTimeoutError("too late", timeout_s=9.0)
    with pytest.raises(errors.CollectiveTimeoutError) as caught:
        comm.allreduce(torch.ones(3))
    error, call = caught.value, "#2 allreduce(3 x float32, sum)"
    assert (error.call, error.sequence, error.rank, error.history) == (call, 2, 0, ("#1 barrier()", call))
    assert error.elapsed_s is not None
    assert not comm.usable
    assert transport.aborts == [(f"it left {call} with CollectiveTimeoutError: too late", 0)]
    transport.then = DONE
    with pytest.raises(errors.CommunicatorClosedError, match="too late") as refused:
        comm.barrier()
    assert refused.value.__cause__ is error
    assert len(transport.calls) == 2, "a refused call is not sent"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("a bug"), MemoryError()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_ends_a_call_half_way_breaks_the_communicator(comm, transport, error, asynchronous):
    transport.then = Mock(spec=Handle, **{"wait.side_effect": error, "is_completed.return_value": False})
    with pytest.raises(type(error)) as caught:
        work = comm.allreduce(torch.ones(3), async_op=asynchronous)
        work.wait()
    assert caught.value is error
    assert not comm.usable
    reason, culprit = transport.aborts[0]
    assert type(error).__name__ in reason
    assert culprit == 0
    with pytest.raises(errors.CommunicatorClosedError):
        comm.barrier()


@pytest.mark.parametrize("error", [errors.ConfigurationError("no", argument="tensor"), errors.ConcurrentUseError("no")])
def test_a_call_that_was_not_started_has_no_number_and_breaks_nothing(comm, transport, error):
    transport.then = error
    with pytest.raises(type(error)):
        comm.allreduce(torch.ones(3))
    transport.then = DONE
    comm.allreduce(torch.ones(3))
    assert [call.sequence for call, *_ in transport.calls] == [1, 1]
    assert transport.aborts == []


def test_a_handler_that_raises_before_a_call_is_started_leaves_no_gap_in_the_numbers():
    code, went_on = CallPipeline.run.__code__, 0

    def trace(frame, event, _):
        if event == "line" and frame.f_lineno == at:
            raise KeyboardInterrupt
        return trace if frame.f_code is code else None

    for at in sorted({number for *_, number in code.co_lines() if number}):
        transport = Scripted()
        comm = Communicator(transport, 9.0)
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as traced:
            traced.callback(sys.settrace, sys.gettrace())
            sys.settrace(trace)
            comm.barrier()
        if comm.usable and not comm.pipeline.in_use.locked():
            went_on += 1
            comm.barrier()
            assert [call.sequence for call, *_ in transport.calls] == list(range(1, len(transport.calls) + 1)), at
    assert went_on > 10


def test_tensors_that_can_be_gone_through_once_are_reduced(comm, transport):
    comm.allreduce_coalesced(torch.ones(size) for size in (2, 3))
    comm.broadcast_coalesced((torch.ones(size) for size in (1, 3)), 0)
    assert [call.numel for call, *_ in transport.calls] == [5, 4]


@pytest.mark.parametrize("wrong", [{"a": 1, "b": 2, "c": 3}, "abc", {1, 2, 3}])
def test_objects_to_scatter_have_an_order(comm, wrong):
    with pytest.raises(errors.ConfigurationError, match="objs"):
        comm.scatter_object(wrong, 0)


def test_abort_is_told_to_the_transport_and_kept_as_the_reason(comm, transport):
    comm.abort("the user is tired")
    assert transport.aborts == [("it aborted the communicator: the user is tired", None)]
    with pytest.raises(errors.CommunicatorClosedError, match="the user is tired"):
        comm.barrier()


def test_closing_twice_closes_once(comm, transport):
    comm.close()
    comm.close()
    assert transport.closed == 1
    with pytest.raises(errors.CommunicatorClosedError, match=r"it was closed .*before that, or on a new group"):
        comm.allreduce(torch.ones(1))


@pytest.mark.parametrize("error", [errors.PeerLostError("gone", peers=(2,)), errors.CollectiveMismatchError("no")])
def test_a_failed_call_is_not_counted_and_the_first_reason_stays(comm, transport, error):
    comm.barrier()
    transport.then = error
    with pytest.raises(type(error)):
        comm.barrier()
    assert comm.stats()["barrier"].calls == 1
    comm.abort("later")
    with pytest.raises(errors.CommunicatorClosedError, match=f"used: {error.problem} "):
        comm.barrier()


@pytest.mark.parametrize(
    ("call", "bytes_sent"),
    [
        (Call("allreduce", torch.float32, 8, "sum"), 2 * 32 * 3 // 4),
        (Call("broadcast", torch.float32, 8, root=0), 32 * 3 // 4),
        (Call("reduce", torch.float32, 8, "sum", 0), 32 * 3 // 4),
        (Call("reduce_scatter", torch.float32, 8, "sum"), 32 * 3),
        (Call("allgather", torch.float32, 8), 32 * 3), (Call("alltoall", torch.float32, 8), 32 * 3),
        (Call("gather", torch.float32, 8, root=1), 0), (Call("gather", torch.float32, 8, root=0), 32),
        (Call("scatter", torch.float32, 8, root=1), 32 * 3), (Call("scatter", torch.float32, 8, root=0), 0),
        (Call("alltoall_v", torch.float32, 0, send_counts=(1, 5, 2, 3), recv_counts=(1, 1, 1, 1)), 4 * 6),
        (Call("send", torch.float64, 8, root=0), 64), (Call("recv", torch.float64, 8, root=0), 0),
        (Call("sendrecv", torch.float64, 8, root=0, source=2), 64), (Call("barrier", torch.uint8), 0),
    ],
    ids=str,
)  # fmt: skip
def test_bytes_that_a_rank_must_send(call, bytes_sent):
    statistics = Statistics(Place("world", "threads", 1, (0, 1, 2, 3)))
    statistics.end(statistics.begin(call, 0.0), 1.0, blocked_s=0.0)
    assert statistics.kinds[call.kind].sent_bytes == bytes_sent
    statistics.end(statistics.begin(call, 0.0), 1.0, blocked_s=0.0)
    assert statistics.kinds[call.kind].sent_bytes == 2 * bytes_sent


def test_every_kind_is_counted_somewhere():
    (parameters,) = test_bytes_that_a_rank_must_send.pytestmark
    assert {call.kind for call, _ in parameters.args[1]} == {*COLLECTIVES, *POINT_TO_POINT}


@pytest.mark.skipif(shm_refusal() is not None, reason="needs shared memory")
@on_communicators(2, transport=ShmTransport)
def test_a_small_allreduce_takes_few_functions(comm: Communicator) -> None:
    tensor, found = torch.ones(1), []
    for _ in range(8):  # What is the same as in the call before is kept for both slots.
        comm.barrier()
        if comm.rank == 0:
            time.sleep(0.05)  # The other one has come, and sleeps.
        found.append([])
        sys.setprofile(lambda frame, event, _: found[-1].append(frame.f_code.co_name) if event == "call" else None)
        comm.allreduce(tensor, ReduceOp.AVG)
        sys.setprofile(None)
    assert tensor.tolist() == [1.0]
    seen = min(found[2:], key=len)
    assert comm.rank or len(seen) <= 37, seen  # seven of them keep the record of calls


def torch_group(comm: Communicator) -> TorchGroup:
    members = SimpleNamespace(global_communicator=comm, rank=comm.rank, size=comm.size, label="test")
    return TorchGroup(CallStarter(Connected(HashStore(), members, SimpleNamespace(timeout_s=10.0), {})))


def synchronous(options: Any) -> Any:
    options.asyncOp = False
    return options


def allreduce(group: TorchGroup, tensor: torch.Tensor) -> None:
    group.allreduce([tensor], synchronous(distributed_c10d.AllreduceOptions()))


def barrier(group: TorchGroup) -> None:
    group.barrier(synchronous(distributed_c10d.BarrierOptions())).wait()


def when_inside(kind: str, function: Callable[[], object]) -> Callable[[Step], None]:
    """A fault hook that calls ``function`` when rank 0 has published a call of ``kind`` and does not yet wait."""

    def fault(step: Step) -> None:
        if (step.rank, step.call.kind, step.name) == (0, kind, "arrive"):
            function()

    return fault


@pytest.mark.threads
def test_a_thread_sends_and_starts_a_collective_behind_the_one_that_another_waits_in() -> None:
    inside = threading.Event()

    def job(comm: Communicator) -> list[float]:
        group, first, second, message = torch_group(comm), torch.ones(1), torch.full((2,), 3.0), torch.zeros(1)
        if comm.rank == 0:
            thread = threading.Thread(target=allreduce, args=(group, first))
            thread.start()
            assert inside.wait(60)
            work = group.allreduce([second])
            assert not work.is_completed()
            group.send([message], 1).wait()
            work.wait()
            thread.join(60)
        else:
            group.recv([message], 0).wait()
            allreduce(group, first)
            allreduce(group, second)
        barrier(group)
        return [*first.tolist(), *second.tolist()]

    assert values(run(2, job, fault=when_inside("allreduce", inside.set))) == [[2, 6, 6]] * 2


@pytest.mark.threads
def test_a_call_in_the_middle_of_another_of_the_same_thread_is_refused_at_once() -> None:
    groups: dict[int, TorchGroup] = {}
    refused: list[str] = []

    def interrupt() -> None:
        for call in (barrier, lambda group: group.barrier()):
            with pytest.raises(errors.ConcurrentUseError, match="in the middle of another") as caught:
                call(groups[0])
            refused.append(str(caught.value))

    def job(comm: Communicator) -> float:
        groups[comm.rank] = torch_group(comm)
        allreduce(groups[comm.rank], summed := torch.ones(1))
        barrier(groups[comm.rank])
        assert comm.usable
        return summed.item()

    assert values(run(2, job, fault=when_inside("allreduce", interrupt))) == [2, 2]
    assert len(refused) == 2
    assert "barrier" in refused[0]


@pytest.mark.threads
def test_a_signal_handler_communicates_while_the_main_thread_waits() -> None:
    """Its barrier is the one behind that of the main thread, as on torch's Gloo."""
    store, inside, handling, ended = HashStore(), threading.Event(), threading.Event(), []

    def rank(number: int) -> TorchGroup:
        with inject_fault(when_inside("barrier", inside.set)):
            return torch_group(Communicator(ThreadsTransport(membership(store, number, 2)), 10.0))

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


@pytest.mark.threads
def test_who_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGPIPE: signal.SIG_IGN}
    monkeypatch.setattr(turns._signal, "getsignal", lambda number: handlers.get(number, signal.SIG_DFL))
    assert not turns.handlers_may_call()
    unhashable = SimpleNamespace(__call__=print)
    for handler in (print, unhashable):
        handlers[signal.SIGUSR1] = handler
        assert turns.handlers_may_call()
    assert in_threads(1, lambda _: turns.handlers_may_call()) == [False], "handlers run in the main thread"


@pytest.mark.threads
def test_each_thread_collects_its_own_calls() -> None:
    alone, cpu = solo_group(), torch.device("cpu")
    group = torch_group(alone.global_communicator)
    group._start_coalescing(cpu)
    in_threads(1, lambda _: group.allreduce([torch.ones(1)]))
    assert group._end_coalescing(cpu).pending is None
    group._start_coalescing(cpu)
    group.allreduce([torch.ones(1)])
    assert group._end_coalescing(cpu).pending is not None
