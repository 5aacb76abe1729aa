"""Groups of backend ``bagua`` that get other members behind the same object. Ranks are threads here."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bagua import errors
from bagua.comm import ReconfigureOptions, connect_store, create_torch_group, serve_store, torch_private
from bagua.comm.torch_backend.creation import create_requested_group
from tests.contract.failures import caught
from tests.harness import in_threads

pytestmark = pytest.mark.shm

TIMEOUT = timedelta(seconds=20)


class Members:
    """Groups of one rank each, which become one group, and another one."""

    def __init__(self, count: int) -> None:
        self.groups = [create_torch_group(dist.HashStore(), 0, 1, TIMEOUT) for _ in range(count)]
        self.handles = [group.get_reconfigure_handle() for group in self.groups]
        self.number = 0

    def each(self, function: Callable[[Any, int], Any], members: Sequence[int]) -> list[Any]:
        return in_threads(len(members), lambda place: function(self.groups[members[place]], members[place]))

    def become(self, order: Sequence[int], timeout: timedelta = TIMEOUT) -> None:
        self.number += 1
        chosen = ReconfigureOptions(self.number, [self.handles[member] for member in order], timeout)
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
        expected = [(rank, len(order), float(order[0]), float(sum(order))) for rank in range(len(order))]
        assert members.each(whose_value, order) == expected
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
    group = members.groups[0]
    assert group._starter.timeout_s == group.members.timeout_s == TIMEOUT.total_seconds()
    group.set_timeout(timedelta(seconds=0.3))
    members.become([0, 1])
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=0.2))
    with pytest.raises(errors.CollectiveTimeoutError, check=lambda error: error.timeout_s == 0.2):
        group.allreduce(torch.ones(1)).wait()


def test_calls_under_way_end_and_derived_groups_are_refused(members: Members) -> None:
    members.become([0, 1, 2])
    derived = members.each(lambda group, _: group.members.duplicate(), [0, 1, 2])
    waiting = threading.Event()

    def wait() -> None:
        work = members.groups[0].allreduce([torch.ones(1)], dist.AllreduceOptions())
        waiting.set()
        with pytest.raises(errors.CommunicationError):
            work.wait()

    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(wait)
        assert waiting.wait(20)
        members.become([2, 0])
        pending.result(20)
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
    groups = in_threads(2, lambda rank: create_torch_group(connect_store(port, 20.0), rank, 2, TIMEOUT))
    del store
    chosen = ReconfigureOptions(1, [group.get_reconfigure_handle() for group in reversed(groups)])
    in_threads(2, lambda place: groups[place].reconfigure(chosen))
    assert in_threads(2, lambda place: whose_value(groups[place], 5 + place)) == [(1, 2, 6.0, 11.0), (0, 2, 6.0, 11.0)]
    for group in groups:
        group.shutdown()


def test_a_set_of_handles_has_an_order_too(members: Members) -> None:
    chosen = ReconfigureOptions(9, set(members.handles[:2]))
    members.each(lambda group, _: group.reconfigure(chosen), [0, 1])
    assert sorted(group.rank() for group in members.groups[:2]) == [0, 1]


def failed(kind: type[errors.BaguaError], group: Any, handles: Sequence[str]) -> Any:
    """How it did not succeed. The group is then closed, and may be reconfigured again."""
    error, seconds = caught(lambda: group.reconfigure(ReconfigureOptions(77, handles, timedelta(seconds=0.5))), kind)
    assert seconds < 5.5  # An upper bound.
    return error


def test_a_member_that_never_comes(members: Members) -> None:
    assert failed(errors.CollectiveTimeoutError, members.groups[0], members.handles).peers == (1, 2)
    with pytest.raises(errors.CommunicatorClosedError):
        members.groups[0].allreduce(torch.ones(1))
    members.become([0])
    assert members.each(whose_value, [0]) == [(0, 1, 0.0, 0.0)]


def test_a_first_member_that_is_gone(members: Members) -> None:
    members.groups[1].shutdown()
    assert failed(errors.PeerLostError, members.groups[0], [members.handles[1], members.handles[0]]).peers == (0,)


def test_a_handle_of_another_job(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    group, (own, other, _) = members.groups[0], members.handles
    stale = json.dumps({**json.loads(other), "bagua": "somebody else's"})
    assert "another job" in str(failed(errors.ConfigurationError, group, [stale, own]))
    monkeypatch.setenv("BAGUA_TOKEN", "another")
    assert "another job" in str(failed(errors.ConfigurationError, group, [other, own]))


def test_what_is_no_list_of_handles_leaves_the_group_as_it_is(members: Members) -> None:
    own, other = members.handles[:2]
    for handles in (["gloo:1"], ["[]"], [other], [own, own], []):
        failed(errors.ConfigurationError, members.groups[0], handles)
    assert members.each(whose_value, [0]) == [(0, 1, 0.0, 0.0)]


def test_a_group_that_waits_for_its_first_members() -> None:
    """``enable_reconfigure`` of torch 2.14: nothing is connected before."""
    asked = torch_private.backend_request()
    if not hasattr(asked, "enable_reconfigure"):  # An older torch, which asks for no such group.
        asked = SimpleNamespace()
    asked.store, asked.group_rank, asked.group_size, asked.timeout = dist.HashStore(), 1, 4, TIMEOUT
    asked.group_id, asked.global_ranks_in_group, asked.enable_reconfigure = "waiting", [], True
    group = create_requested_group(asked, None)
    assert (group.rank(), group.size()) == (1, 4)
    with pytest.raises(errors.CommunicatorClosedError, match="reconfigure"):
        group.allreduce(torch.ones(1))
    group.reconfigure(ReconfigureOptions(1, [group.get_reconfigure_handle()]))
    assert whose_value(group, 3) == (0, 1, 3.0, 3.0)
    group.shutdown()
