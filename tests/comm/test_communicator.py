"""The path of every call, over a transport that does what a test says."""

import sys

import pytest
import torch

from bagua.comm import Communicator, Membership, Place
from bagua.comm.call import COLLECTIVES, POINT_TO_POINT, Call
from bagua.comm.pipeline import CallPipeline
from bagua.comm.records.recorder import Statistics
from bagua.comm.store.serving import thread_store
from bagua.comm.transports.contract import DONE, Handle, Transport
from bagua.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    ConcurrentUseError,
    ConfigurationError,
    PeerLostError,
)


class Scripted(Transport):
    """Notes its calls; `then` says what becomes of each."""

    name = "scripted"

    def __init__(self, size=3):
        super().__init__(Membership(thread_store(), 0, tuple(range(size)), (0,) * size, 9.0, "test"))
        self.calls, self.tensors, self.aborts, self.closed = [], [], [], 0
        self.then = lambda call: DONE

    def start(self, call, source, target, timeout_s, asynchronous):
        self.calls.append((call, timeout_s, asynchronous))
        self.tensors.append((source, target))
        return self.then(call)

    def abort(self, reason, culprit=None):
        self.aborts.append((reason, culprit))

    def close(self):
        self.closed += 1


class Later(Handle):
    """A started call that ends with an error, or well."""

    def __init__(self, error=None, completed=False):
        self.error, self.completed, self.waits = error, completed, []

    def wait(self, timeout_s=None):
        self.waits.append(timeout_s)
        if self.error is not None:
            raise self.error

    def is_completed(self):
        return self.completed


@pytest.fixture
def transport():
    return Scripted()


@pytest.fixture
def comm(transport):
    return Communicator(transport, 9.0)


def raising(error):
    def then(call):
        raise error

    return then


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
    transport.then = raising(CollectiveTimeoutError("too late", timeout_s=9.0))
    with pytest.raises(CollectiveTimeoutError) as caught:
        comm.allreduce(torch.ones(3))
    error = caught.value
    assert (error.call, error.sequence, error.rank) == ("#2 allreduce(3 x float32, sum)", 2, 0)
    assert error.elapsed_s is not None
    assert error.history == ("#1 barrier()", "#2 allreduce(3 x float32, sum)")
    assert not comm.usable
    assert transport.aborts == [("it left #2 allreduce(3 x float32, sum) with CollectiveTimeoutError: too late", 0)]
    transport.then = lambda call: DONE
    with pytest.raises(CommunicatorClosedError, match="too late") as refused:
        comm.barrier()
    assert refused.value.__cause__ is error
    assert len(transport.calls) == 2, "a refused call is not sent"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), RuntimeError("a bug"), MemoryError()])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_ends_a_call_half_way_breaks_the_communicator(comm, transport, error, asynchronous):
    transport.then = lambda call: Later(error)
    with pytest.raises(type(error)) as caught:
        work = comm.allreduce(torch.ones(3), async_op=asynchronous)
        work.wait()
    assert caught.value is error
    assert not comm.usable
    reason, culprit = transport.aborts[0]
    assert type(error).__name__ in reason
    assert culprit == 0
    with pytest.raises(CommunicatorClosedError):
        comm.barrier()


@pytest.mark.parametrize("error", [ConfigurationError("not here", argument="tensor"), ConcurrentUseError("not now")])
def test_a_call_that_was_not_started_has_no_number_and_breaks_nothing(comm, transport, error):
    transport.then = raising(error)
    with pytest.raises(type(error)):
        comm.allreduce(torch.ones(3))
    transport.then = lambda call: DONE
    comm.allreduce(torch.ones(3))
    assert [call.sequence for call, *_ in transport.calls] == [1, 1]
    assert transport.aborts == []


def interrupt(comm, code, at):
    """Make a call, in which a signal handler raises at line ``at`` of ``code``."""

    def trace(frame, event, _):
        return line if frame.f_code is code else None

    def line(frame, event, _):
        if event == "line" and frame.f_lineno == at:
            raise KeyboardInterrupt
        return line

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        comm.barrier()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def test_a_handler_that_raises_before_a_call_is_started_leaves_no_gap_in_the_numbers():
    code = CallPipeline.run.__code__
    went_on = 0
    for at in sorted({number for *_, number in code.co_lines() if number}):
        transport = Scripted()
        comm = Communicator(transport, 9.0)
        interrupt(comm, code, at)
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
    with pytest.raises(ConfigurationError, match="objs"):
        comm.scatter_object(wrong, 0)


def test_the_result_is_copied_back_when_the_wait_is_over(comm, transport):
    odd = torch.zeros(2, 3).t()
    transport.then = lambda call: Later()
    work = comm.allreduce(odd, async_op=True)
    transport.tensors[0][1].fill_(5.0)
    assert odd.sum().item() == 0.0
    work.wait()
    assert odd.sum().item() == 30.0


def test_abort_is_told_to_the_transport_and_kept_as_the_reason(comm, transport):
    comm.abort("the user is tired")
    assert transport.aborts == [("it aborted the communicator: the user is tired", None)]
    with pytest.raises(CommunicatorClosedError, match="the user is tired"):
        comm.barrier()


def test_closing_twice_closes_once(comm, transport):
    comm.close()
    comm.close()
    assert transport.closed == 1
    with pytest.raises(CommunicatorClosedError, match=r"it was closed .*before that, or on a new group"):
        comm.allreduce(torch.ones(1))


def test_the_first_reason_stays(comm, transport):
    transport.then = raising(PeerLostError("rank 2 is gone", peers=(2,)))
    with pytest.raises(PeerLostError):
        comm.barrier()
    comm.abort("later")
    with pytest.raises(CommunicatorClosedError, match="rank 2 is gone"):
        comm.barrier()


def test_a_failed_call_is_not_counted(comm, transport):
    comm.barrier()
    transport.then = raising(CollectiveMismatchError("no"))
    with pytest.raises(CollectiveMismatchError):
        comm.barrier()
    assert comm.stats()["barrier"].calls == 1


# Counters.


@pytest.mark.parametrize(
    ("call", "bytes_sent"),
    [
        (Call("allreduce", 1, torch.float32, 8, "sum"), 2 * 32 * 3 // 4),
        (Call("broadcast", 1, torch.float32, 8, root=0), 32 * 3 // 4),
        (Call("reduce", 1, torch.float32, 8, "sum", 0), 32 * 3 // 4),
        (Call("allgather", 1, torch.float32, 8), 32 * 3),
        (Call("reduce_scatter", 1, torch.float32, 8, "sum"), 32 * 3),
        (Call("alltoall", 1, torch.float32, 8), 32 * 3),
        (Call("gather", 1, torch.float32, 8, root=1), 0),
        (Call("gather", 1, torch.float32, 8, root=0), 32),
        (Call("scatter", 1, torch.float32, 8, root=1), 32 * 3),
        (Call("scatter", 1, torch.float32, 8, root=0), 0),
        (Call("alltoall_v", 1, torch.float32, 0, send_counts=(1, 5, 2, 3), recv_counts=(1, 1, 1, 1)), 4 * 6),
        (Call("send", 1, torch.float64, 8, root=0), 64),
        (Call("recv", 1, torch.float64, 8, root=0), 0),
        (Call("sendrecv", 1, torch.float64, 8, root=0, source=2), 64),
        (Call("barrier", 1, torch.uint8), 0),
    ],
    ids=str,
)
def test_bytes_that_a_rank_must_send(call, bytes_sent):
    statistics = Statistics(Place("world", "threads", 1, (0, 1, 2, 3)))
    statistics.end(statistics.begin(call, 0.0), 1.0, blocked_s=0.0)
    assert statistics.snapshot()[call.kind].sent_bytes == bytes_sent
    statistics.end(statistics.begin(call, 0.0), 1.0, blocked_s=0.0)
    assert statistics.snapshot()[call.kind].sent_bytes == 2 * bytes_sent


def test_every_kind_is_counted_somewhere():
    (parameters,) = test_bytes_that_a_rank_must_send.pytestmark
    assert {call.kind for call, _ in parameters.args[1]} == {*COLLECTIVES, *POINT_TO_POINT}
