"""Works on CUDA streams, which no host thread waits for: on a backend that only pretends."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore

from bagua.comm.communicator import Communicator
from bagua.comm.transports.c10d import torch_transport as c10d
from bagua.comm.transports.c10d.groups import NcclGroup
from bagua.comm.transports.c10d.handles import Monitor, StreamWatch
from bagua.comm.transports.failure import Cause
from bagua.errors import CollectiveTimeoutError, CommunicatorClosedError, PeerLostError
from tests.comm.memory_ranks import membership
from tests.harness import in_threads, until

NO_FAILURES: Any = SimpleNamespace(broken=False, peers_left=lambda: False)


@dataclass(eq=False)
class StreamWork:
    """A work whose wait makes a stream wait, and returns at once.

    Attributes:
        meanwhile: what happens during a wait that holds the host.
        let_go: gets the name of the thread that drops this work.
    """

    let_go: list[str] = field(default_factory=list)
    completed: bool = False
    waits: int = 0
    meanwhile: Callable[[], object] = bool

    def __del__(self) -> None:
        self.let_go.append(threading.current_thread().name)

    def wait(self) -> bool:
        self.waits += 1
        self.meanwhile()
        return True

    def is_completed(self) -> bool:
        return self.completed


class StreamBackend:
    """NCCL as bagua sees it: every call starts a work that this test completes."""

    def __init__(self) -> None:
        self.works: list[StreamWork] = []
        self.ended: list[str] = []
        self.others_close = threading.Event()
        self.others_close.set()

    def allreduce(self, *_: Any) -> StreamWork:
        self.works.append(StreamWork())
        return self.works[-1]

    recv = send = allreduce

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        assert self.others_close.wait(60.0)
        self.ended.append("shutdown")


class StreamGroup(NcclGroup):
    device_types = frozenset({"cpu"})
    connects_late = False  # The ranks of most tests call one at a time.

    def _create(self, store: Any, members: Any) -> Any:
        return StreamBackend()


class Rank:
    def __init__(self, rank: int, store: HashStore) -> None:
        self.transport = c10d.C10dTransport("gloo", membership(store, rank, 2, timeout_s=20.0))
        self.comm = Communicator(self.transport, 20.0)
        # Held here, so that no other thread lets go of its works.
        self.backend: StreamBackend = self.transport._default.group.group


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Any:
    quick = Monitor(poll_s=0.005, notice_poll_s=0.02)
    monkeypatch.setattr("bagua.comm.transports.c10d.handles.monitor", quick)
    yield quick
    quick.stop()


rank = pytest.fixture(lambda ranks: ranks[0])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, monitor: Monitor) -> Any:
    monkeypatch.setattr(c10d, "create_group", lambda name, members: StreamGroup(name, members.store, members))
    store = HashStore()
    pair = in_threads(2, lambda rank: Rank(rank, store))
    yield pair
    for rank in pair:
        rank.comm.close()


def test_the_host_does_not_wait(rank: Rank) -> None:
    assert rank.comm.executor == "stream"
    rank.comm.allreduce(torch.ones(2))
    rank.comm.allreduce(torch.ones(2), async_op=True).wait()
    assert [started.waits for started in rank.backend.works] == [1, 1]
    assert not any(started.completed for started in rank.backend.works)
    assert rank.comm.usable


def test_a_wait_with_a_timeout_does_block(rank: Rank) -> None:
    work = rank.comm.allreduce(torch.ones(2), async_op=True)
    threading.Timer(0.1, setattr, [rank.backend.works[0], "completed", True]).start()
    work.wait(10.0)
    assert rank.backend.works[0].completed
    late = rank.comm.allreduce(torch.ones(2), async_op=True)
    with pytest.raises(CollectiveTimeoutError):
        late.wait(0.05)
    assert rank.backend.ended == ["abort"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_deadline_breaks_the_communicator_and_the_wait_or_the_next_call_says_so(rank: Rank, waits: bool) -> None:
    work = rank.comm.allreduce(torch.ones(2), async_op=waits, timeout=0.05)
    until(lambda: rank.backend.ended == ["abort"])
    with pytest.raises(CollectiveTimeoutError) as caught:
        work.wait() if waits else rank.comm.broadcast(torch.ones(3), 0)
    error = caught.value  # It tells of the call that is late, not of the one that raises.
    assert (error.timeout_s, error.peers) == (0.05, (1,))
    assert (error.call, error.sequence) == ("#1 allreduce(2 x float32, sum)", 1)
    with pytest.raises(CommunicatorClosedError):
        rank.comm.allreduce(torch.ones(2))


def test_the_reason_of_a_peer_that_left_reaches_the_next_call(ranks: list[Rank]) -> None:
    ranks[0].comm.allreduce(torch.ones(2))
    ranks[1].comm.abort("its loss is not finite")
    until(lambda: ranks[0].backend.ended == ["abort"])
    with pytest.raises(PeerLostError, match="its loss is not finite", check=lambda error: error.peers == (1,)):
        ranks[0].comm.allreduce(torch.ones(2))


def test_the_monitor_never_drops_a_work_itself(monitor: Monitor) -> None:
    """To drop one may wait for the device, which waits for a call that nobody but the monitor would end."""
    let_go: list[str] = []  # Of these works only: the garbage of other tests may be collected by any thread.
    for _ in range(20):
        work = StreamWork(let_go)
        monitor.watch(StreamWatch(NO_FAILURES, (work,), 20.0))
        work.completed = True
        del work
        until(lambda: not monitor._watched)
    assert set(let_go) == {"MainThread"}
    assert len(let_go) == 19, "the last one is let go by the next call"


def test_a_call_that_is_ended_while_it_holds_the_host_says_so(rank: Rank) -> None:
    """As a barrier of NCCL does."""
    work = rank.comm.allreduce(torch.ones(2), async_op=True, timeout=0.05)
    rank.backend.works[0].meanwhile = lambda: until(lambda: rank.backend.ended == ["abort"])
    with pytest.raises(CollectiveTimeoutError):
        work.wait()


@pytest.fixture
def late_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Their first call connects them, which holds the host."""
    monkeypatch.setattr(StreamGroup, "connects_late", True)
    return request.getfixturevalue("ranks")


def allreduce(comm: Communicator, timeout_s: float = 60.0) -> None:
    comm.allreduce(torch.ones(2), async_op=True, timeout=timeout_s)


def message(comm: Communicator, timeout_s: float = 60.0) -> None:
    move = comm.send if comm.rank == 1 else comm.recv
    move(torch.ones(2), 1 - comm.rank, async_op=True, timeout=timeout_s)


@pytest.mark.parametrize(("call", "all_met"), [(allreduce, False), (message, False), (message, True)])
def test_a_rank_that_never_comes_to_the_first_call_is_named(late_ranks: list[Rank], call: Any, all_met: bool) -> None:
    """Also one that does not come to the first message of a pair after all have met."""
    if all_met:
        in_threads(2, lambda number: allreduce(late_ranks[number].comm))
    with pytest.raises(CollectiveTimeoutError, check=lambda error: error.peers == (1,)):
        call(late_ranks[0].comm, 0.2)
    assert len(late_ranks[0].backend.works) == all_met, "nothing of torch's was started, where no deadline counts"
    assert not late_ranks[0].comm.usable


def test_a_rank_that_left_before_the_first_call_ends_it(late_ranks: list[Rank]) -> None:
    late_ranks[1].comm.abort("its loss is not finite")
    with pytest.raises(PeerLostError, match="its loss is not finite"):
        late_ranks[0].comm.allreduce(torch.ones(2), timeout=60.0)


def test_ranks_meet_once_for_all_and_for_each_pair(late_ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (allreduce, message):
        in_threads(2, lambda number, call=call: call(late_ranks[number].comm))
    monkeypatch.setattr(c10d, "wait_for_keys", None)  # It is not called again.
    for call in (allreduce, message):
        call(late_ranks[0].comm)


def test_closing_shuts_the_backend_down_and_does_not_wait_for_others(rank: Rank) -> None:
    rank.comm.allreduce(torch.ones(2))
    rank.backend.works[0].completed = True
    rank.backend.others_close.clear()
    rank.comm.close()
    assert rank.backend.ended == [], "it waited for the other ranks"
    rank.backend.others_close.set()
    until(lambda: rank.backend.ended == ["shutdown"])


def test_closing_with_works_under_way_aborts_first(ranks: list[Rank]) -> None:
    ranks[0].comm.allreduce(torch.ones(2), async_op=True)
    ranks[0].comm.close()
    until(lambda: ranks[0].backend.ended == ["abort", "shutdown"])
    assert ranks[1].transport.failures._mailbox.cause() == Cause(0, 0, "closed", "it closed its communicator")


def test_a_stopped_monitor_has_no_thread(monitor: Monitor, ranks: list[Rank]) -> None:
    monitor.watch(StreamWatch(ranks[0].transport.failures, (StreamWork(),), 20.0))
    thread = monitor._thread
    assert thread.is_alive()
    monitor.stop()
    assert not thread.is_alive()


def test_a_monitor_that_found_no_thread_looks_for_one_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, work = Monitor(poll_s=0.005), StreamWork()
    call = StreamWatch(NO_FAILURES, (work,), 20.0)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="thread"):
            monitor.watch(call)
    work.completed = True
    monitor.watch(call)
    until(lambda: not monitor._watched)
    monitor.stop()
