"""Works on CUDA streams, which no host thread waits for: on a backend that only pretends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import HashStore

from bagua.comm.communicator import Communicator
from bagua.comm.transports.c10d import handles
from bagua.comm.transports.c10d import torch_transport as c10d
from bagua.comm.transports.c10d.groups import BackendGroup, NcclGroup
from bagua.comm.transports.c10d.handles import Monitor, StreamWatch
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.failure import Cause
from bagua.errors import CollectiveTimeoutError, CommunicatorClosedError, PeerLostError
from tests.comm.memory_ranks import membership
from tests.harness import until


class StreamWork:
    """A work whose wait makes a stream wait, and returns at once.

    Attributes:
        meanwhile: what happens during a wait that holds the host.
        let_go: names of threads that dropped such works.
    """

    let_go: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.completed = False
        self.waits = 0
        self.meanwhile: Callable[[], object] = lambda: None

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
    """One rank of a communicator of two on the pretended backend."""

    def __init__(self, rank: int, store: HashStore) -> None:
        self.transport = C10dTransport("gloo", membership(store, rank, 2, timeout_s=20.0))
        self.comm = Communicator(self.transport, 20.0)
        self.backend: StreamBackend = self.transport._default.group.group


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Any:
    quick = Monitor(poll_s=0.005, notice_poll_s=0.02)
    monkeypatch.setattr(handles, "monitor", quick)
    yield quick
    quick.stop()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, monitor: Monitor) -> Any:
    def create(name: str, members: Any) -> BackendGroup:
        return StreamGroup(name, members.store, members)

    monkeypatch.setattr(c10d, "create_group", create)
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        pair = list(threads.map(lambda rank: Rank(rank, store), range(2)))
    yield pair
    for rank in pair:
        rank.comm.close()


def test_the_host_does_not_wait(ranks: list[Rank]) -> None:
    rank = ranks[0]
    assert rank.comm.executor == "stream"
    rank.comm.allreduce(torch.ones(2))
    work = rank.comm.allreduce(torch.ones(2), async_op=True)
    work.wait()
    assert [started.waits for started in rank.backend.works] == [1, 1]
    assert not any(started.completed for started in rank.backend.works)
    assert rank.comm.usable


def test_a_wait_with_a_timeout_does_block(ranks: list[Rank]) -> None:
    rank = ranks[0]
    work = rank.comm.allreduce(torch.ones(2), async_op=True)
    threading.Timer(0.1, setattr, [rank.backend.works[0], "completed", True]).start()
    work.wait(10.0)
    assert rank.backend.works[0].completed
    late = rank.comm.allreduce(torch.ones(2), async_op=True)
    with pytest.raises(CollectiveTimeoutError):
        late.wait(0.05)
    assert rank.backend.ended == ["abort"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_deadline_breaks_the_communicator_and_the_wait_or_the_next_call_says_so(
    ranks: list[Rank], waits: bool
) -> None:
    rank = ranks[0]
    work = rank.comm.allreduce(torch.ones(2), async_op=waits, timeout=0.05)
    until(lambda: rank.backend.ended == ["abort"])
    with pytest.raises(CollectiveTimeoutError) as caught:
        work.wait() if waits else rank.comm.broadcast(torch.ones(3), 0)
    assert (caught.value.timeout_s, caught.value.peers) == (0.05, (1,))
    assert (caught.value.call, caught.value.sequence) == ("#1 allreduce(2 x float32, sum)", 1), (
        "not the call that raises"
    )
    with pytest.raises(CommunicatorClosedError):
        rank.comm.allreduce(torch.ones(2))


def test_the_reason_of_a_peer_that_left_reaches_the_next_call(ranks: list[Rank]) -> None:
    ranks[0].comm.allreduce(torch.ones(2))
    ranks[1].comm.abort("its loss is not finite")
    until(lambda: ranks[0].backend.ended == ["abort"])
    with pytest.raises(PeerLostError, match="its loss is not finite") as caught:
        ranks[0].comm.allreduce(torch.ones(2))
    assert caught.value.peers == (1,)


def test_the_monitor_never_drops_a_work_itself(monitor: Monitor) -> None:
    """To drop one may wait for the device, which waits for a call that nobody but the monitor would end."""
    failures: Any = SimpleNamespace(broken=False, peers_left=lambda: False)
    StreamWork.let_go.clear()
    for _ in range(20):
        work = StreamWork()
        monitor.watch(StreamWatch(failures, (work,), 20.0))
        work.completed = True
        del work
        until(lambda: not monitor._watched)
    assert set(StreamWork.let_go) == {"MainThread"}
    assert len(StreamWork.let_go) == 19, "the last one is let go by the next call"


def test_a_call_that_is_ended_while_it_holds_the_host_says_so(ranks: list[Rank]) -> None:
    """As a barrier of NCCL does."""
    rank = ranks[0]
    work = rank.comm.allreduce(torch.ones(2), async_op=True, timeout=0.05)
    rank.backend.works[0].meanwhile = lambda: until(lambda: rank.backend.ended == ["abort"])
    with pytest.raises(CollectiveTimeoutError):
        work.wait()


# The first call connects ranks, which holds the host.


@pytest.fixture
def late_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setattr(StreamGroup, "connects_late", True)
    return request.getfixturevalue("ranks")


CALLS: dict[str, Callable[[Communicator, float], Any]] = {
    "allreduce": lambda comm, timeout_s: comm.allreduce(torch.ones(2), async_op=True, timeout=timeout_s),
    "recv": lambda comm, timeout_s: comm.recv(torch.ones(2), 1, async_op=True, timeout=timeout_s),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_rank_that_never_comes_to_the_first_call_is_named(late_ranks: list[Rank], kind: str) -> None:
    with pytest.raises(CollectiveTimeoutError) as caught:
        CALLS[kind](late_ranks[0].comm, 0.2)
    assert caught.value.peers == (1,)
    assert late_ranks[0].backend.works == [], "nothing of torch's was started, where no deadline counts"
    assert not late_ranks[0].comm.usable


def test_a_rank_that_left_before_the_first_call_ends_it(late_ranks: list[Rank]) -> None:
    late_ranks[1].comm.abort("its loss is not finite")
    with pytest.raises(PeerLostError, match="its loss is not finite"):
        late_ranks[0].comm.allreduce(torch.ones(2), timeout=60.0)


def on_both(ranks: list[Rank], *calls: Callable[[Communicator, float], Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for started in [threads.submit(call, rank.comm, 60.0) for rank, call in zip(ranks, calls, strict=True)]:
            started.result(60.0)


def test_ranks_meet_once_for_all_and_once_for_each_pair(
    late_ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_both(late_ranks, CALLS["allreduce"], CALLS["allreduce"])
    on_both(late_ranks, CALLS["recv"], lambda comm, _: comm.send(torch.ones(2), 0, async_op=True))
    monkeypatch.setattr(c10d, "wait_for_keys", None)  # It is not called again.
    for call in CALLS.values():
        call(late_ranks[0].comm, 60.0)


def test_a_pair_meets_although_all_have_met(late_ranks: list[Rank]) -> None:
    on_both(late_ranks, CALLS["allreduce"], CALLS["allreduce"])
    with pytest.raises(CollectiveTimeoutError) as caught:
        CALLS["recv"](late_ranks[0].comm, 0.2)
    assert caught.value.peers == (1,)


def test_closing_shuts_the_backend_down_and_does_not_wait_for_others(ranks: list[Rank]) -> None:
    rank = ranks[0]
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
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monitor, work = Monitor(poll_s=0.005), StreamWork()
    failures: Any = SimpleNamespace(broken=False, peers_left=lambda: False)
    call = StreamWatch(failures, (work,), 20.0)
    with monkeypatch.context() as short:
        short.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="thread"):
            monitor.watch(call)
    work.completed = True
    monitor.watch(call)
    until(lambda: not monitor._watched)
    monitor.stop()
