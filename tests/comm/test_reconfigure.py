"""Groups of backend ``bagua`` that get other members behind the same object. Ranks are threads here."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua import errors
from bagua.comm import ReconfigureOptions, create_torch_group, torch_private
from bagua.comm.store.serving import connect_store, serve_store
from bagua.comm.torch_backend.creation import create_requested_group
from bagua.testing import ProcessRanks
from tests.comm import torch_backend_ranks as ranks
from tests.versions import needs

pytestmark = pytest.mark.shm

TIMEOUT = timedelta(seconds=20)


class Members:
    """Groups of one rank each, which become one group, and another one."""

    def __init__(self, count: int) -> None:
        self.groups = [create_torch_group(dist.HashStore(), 0, 1, TIMEOUT) for _ in range(count)]
        self.handles = [group.get_reconfigure_handle() for group in self.groups]
        self.number = 0

    def each(self, function: Callable[[Any, int], Any], members: Sequence[int]) -> list[Any]:
        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(lambda member: function(self.groups[member], member), members))

    def become(self, order: Sequence[int], **options: Any) -> None:
        self.number += 1
        handles = [self.handles[member] for member in order]
        options.setdefault("timeout", TIMEOUT)
        chosen = ReconfigureOptions(self.number, handles, **options)
        self.each(lambda group, _: group.reconfigure(chosen).wait(), order)


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members(3)
    yield made
    for group in made.groups:
        group.shutdown()


def whose_value(group: Any, member: int) -> tuple[int, int, float, float]:
    """Rank, size, what rank 0 sends, and the sum over all."""
    sent, total = torch.tensor([float(member)]), torch.tensor([float(member)])
    group.broadcast(sent, root=0).wait()
    group.allreduce(total).wait()
    return group.rank(), group.size(), sent.item(), total.item()


def test_members_leave_come_back_and_change_their_order(members: Members) -> None:
    assert all(group.supports_reconfigure for group in members.groups)
    for order in ([0, 1, 2], [2, 0], [1, 2, 0]):
        members.become(order)
        found = members.each(whose_value, order)
        assert found == [(rank, len(order), float(order[0]), float(sum(order))) for rank in range(len(order))]
    assert [group.get_reconfigure_handle() for group in members.groups] == members.handles


def test_everything_that_has_a_rank_follows(members: Members) -> None:
    """Tags and sparse tensors go through Gloo; C++ asks for the size; futures have a new thread."""
    members.become([1, 0])
    members.become([2, 1])

    def calls(group: Any, member: int) -> list[Any]:
        other, received = 1 - group.rank(), torch.empty(1)
        sending = group.send([torch.tensor([float(member)])], other, 7)
        group.recv([received], other, 7).wait()
        sending.wait()
        sparse = torch.eye(2).to_sparse()
        group.allreduce([sparse]).wait()
        total = group.allreduce(torch.ones(1)).get_future().then(lambda done: done.value()[0].item()).wait()
        return [received.item(), sparse.to_dense().sum().item(), total, dist.ProcessGroup.size(group)]

    assert members.each(calls, [2, 1]) == [[1.0, 4.0, 2.0, 2], [2.0, 4.0, 2.0, 2]]


def test_deadlines_are_those_of_the_group(members: Members) -> None:
    members.become([0, 1], timeout=timedelta(seconds=5))
    assert members.groups[0]._starter.timeout_s == TIMEOUT.total_seconds()
    assert members.groups[0].members.timeout_s == TIMEOUT.total_seconds()
    members.groups[0].set_timeout(timedelta(seconds=0.3))
    members.become([0, 1])
    members.groups[0]._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.2))
    with pytest.raises(errors.CollectiveTimeoutError) as raised:
        members.groups[0].allreduce(torch.ones(1)).wait()
    assert raised.value.timeout_s == 0.2


def test_calls_under_way_end_and_derived_groups_are_refused(members: Members) -> None:
    members.become([0, 1, 2])
    derived = members.each(lambda group, _: group.members.duplicate(), [0, 1, 2])
    waiting = threading.Event()

    def wait(group: Any) -> BaseException | None:
        work = group.allreduce([torch.ones(1)], dist.AllreduceOptions())
        waiting.set()
        try:
            work.wait()
        except errors.CommunicationError as error:
            return error
        return None

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(wait, members.groups[0])
        assert waiting.wait(20)
        members.become([2, 0])
        assert isinstance(pending.result(20), errors.CommunicationError)
    with pytest.raises(errors.PeerLostError, match="reconfigured"):
        members.groups[1].allreduce(torch.ones(1)).wait()
    for group in derived:
        with pytest.raises(errors.CommunicationError, match=r"reconfigured|closed"):
            group.global_communicator.allreduce(torch.ones(1))
    assert members.each(whose_value, [2, 0]) == [(0, 2, 2.0, 2.0), (1, 2, 2.0, 2.0)]


def test_a_group_recovers_from_abort_and_shutdown(members: Members) -> None:
    members.become([0, 1, 2])
    members.groups[1].abort()
    members.groups[2].shutdown()
    members.handles[2] = members.groups[2].get_reconfigure_handle()
    members.become([2, 1, 0])
    assert members.each(whose_value, [2, 1, 0]) == [(rank, 3, 2.0, 3.0) for rank in range(3)]


def test_the_host_of_the_first_store_may_be_gone() -> None:
    store, port = serve_store()
    with ThreadPoolExecutor(2) as pool:
        connected = lambda rank: create_torch_group(connect_store(port, 20.0), rank, 2, TIMEOUT)  # noqa: E731
        groups = list(pool.map(connected, range(2)))
        del store
        chosen = ReconfigureOptions(1, [group.get_reconfigure_handle() for group in reversed(groups)])
        list(pool.map(lambda group: group.reconfigure(chosen), groups))
        assert list(pool.map(whose_value, groups, [5, 6])) == [(1, 2, 6.0, 11.0), (0, 2, 6.0, 11.0)]
        for group in groups:
            group.shutdown()


def test_a_set_of_handles_has_an_order_too(members: Members) -> None:
    chosen = ReconfigureOptions(9, set(members.handles[:2]))
    members.each(lambda group, _: group.reconfigure(chosen), [0, 1])
    assert sorted(group.rank() for group in members.groups[:2]) == [0, 1]


# What does not succeed. The group is then closed, and may be reconfigured again.


def failed(group: Any, handles: Sequence[str], seconds: float = 0.5) -> errors.BaguaError:
    started = time.monotonic()
    with pytest.raises(errors.BaguaError) as raised:
        group.reconfigure(ReconfigureOptions(77, list(handles), timedelta(seconds=seconds)))
    assert time.monotonic() - started < seconds + 5.0  # An upper bound.
    return raised.value


def test_a_member_that_never_comes(members: Members) -> None:
    error = failed(members.groups[0], members.handles)
    assert isinstance(error, errors.CollectiveTimeoutError)
    assert error.peers == (1, 2)
    with pytest.raises(errors.CommunicatorClosedError):
        members.groups[0].allreduce(torch.ones(1))
    members.become([0])
    assert members.each(whose_value, [0]) == [(0, 1, 0.0, 0.0)]


def test_a_first_member_that_is_gone(members: Members) -> None:
    members.groups[1].shutdown()
    error = failed(members.groups[0], [members.handles[1], members.handles[0]])
    assert isinstance(error, errors.PeerLostError)
    assert error.peers == (0,)


def test_a_handle_of_another_job(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = {**json.loads(members.handles[1]), "bagua": "somebody else's"}
    error = failed(members.groups[0], [json.dumps(stale), members.handles[0]])
    assert isinstance(error, errors.ConfigurationError)
    assert "another job" in str(error)
    monkeypatch.setenv("BAGUA_TOKEN", "another")
    assert "another job" in str(failed(members.groups[0], [members.handles[1], members.handles[0]]))


def test_what_is_no_list_of_handles_leaves_the_group_as_it_is(members: Members) -> None:
    own, other = members.handles[:2]
    for handles in (["gloo:1"], ["[]"], [other], [own, own], []):
        assert isinstance(failed(members.groups[0], handles), errors.ConfigurationError)
    assert members.each(whose_value, [0]) == [(0, 1, 0.0, 0.0)]


# As torch and its users do it.


def test_a_group_that_waits_for_its_first_members() -> None:
    """``enable_reconfigure`` of torch 2.14: nothing is connected before."""

    def request() -> Any:
        made = torch_private.backend_request()
        made.store, made.group_rank, made.group_size, made.timeout = dist.HashStore(), 1, 4, TIMEOUT
        made.group_id, made.global_ranks_in_group = "waiting", []
        return made

    plain = request()
    asked = plain if hasattr(plain, "enable_reconfigure") else Asked(plain)
    asked.enable_reconfigure = True
    group = create_requested_group(asked, None)
    assert (group.rank(), group.size()) == (1, 4)
    with pytest.raises(errors.CommunicatorClosedError, match="reconfigure"):
        group.allreduce(torch.ones(1))
    group.reconfigure(ReconfigureOptions(1, [group.get_reconfigure_handle()]))
    assert whose_value(group, 3) == (0, 1, 3.0, 3.0)
    group.shutdown()


class Asked:
    """A request of an older torch, with what newer ones say."""

    def __init__(self, request: Any) -> None:
        self.enable_reconfigure = False
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@pytest.fixture(scope="module")
def pool() -> ProcessRanks:
    return ProcessRanks(3, backend=None)


def test_the_default_group_and_what_is_built_on_it(pool: ProcessRanks) -> None:
    store, port = serve_store()
    pool.run(ranks.reconfigured, port, size=3)
    del store


@needs("functions to reconfigure", hasattr(dist, "_reconfigure"))
def test_by_the_functions_of_torch(pool: ProcessRanks) -> None:
    store, port = serve_store()
    pool.run(ranks.reconfigured_by_torch, port, size=2)
    del store
