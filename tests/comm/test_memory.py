"""The collectives of shared memory: results, pieces, order, disagreement."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch

from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.transports.memory import exchange as memory_exchange
from bagua.comm.transports.memory.line import Notice, Step, rows
from bagua.comm.transports.threads import ThreadsTransport
from bagua.errors import CollectiveMismatchError
from tests.comm.memory_ranks import CALLS, KINDS, LARGE, StagedTransport, agrees, run, values

pytestmark = pytest.mark.threads


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_limit(limit: int) -> None:
        monkeypatch.setattr(memory_exchange, "SMALL_BYTES", limit)

    return set_limit


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["sliced", "redundant"])
@pytest.mark.parametrize("numel", [0, 1, 2, 5, 100])
@pytest.mark.parametrize("size", [2, 3])
def test_data_that_is_shown_in_pieces(numel: int, size: int, limit: int, small_limit: Callable[[int], None]) -> None:
    """Every kind, several times in a row, through areas of a few elements that are overwritten."""
    small_limit(limit)

    def job(comm: Communicator) -> bool:
        return all(agrees(comm, kind, numel, times=3) for kind in KINDS)

    assert all(values(run(size, job, transport=StagedTransport)))


#: In several pieces through the areas of ``StagedTransport``.
PIECES = [(kind, numel) for kind in KINDS for numel in (12, 50, 100)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("size", "transport", "calls"),
    [(3, ThreadsTransport, CALLS), (2, StagedTransport, PIECES), (3, StagedTransport, PIECES)],
)
def test_results_do_not_depend_on_who_is_late(
    size: int,
    transport: type[ThreadsTransport],
    calls: list[tuple[str, int]],
    seed: int,
    small_limit: Callable[[int], None],
) -> None:
    if transport is StagedTransport:
        small_limit(0)
    dice = random.Random(seed)

    def delay(step: Step) -> None:
        time.sleep(dice.choice((0, 0, 0.0005)))

    def job(comm: Communicator) -> bool:
        return all(agrees(comm, *call) for call in calls)

    assert all(values(run(size, job, fault=delay, transport=transport)))


def test_rows_of_each_kind() -> None:
    uneven = Call("alltoall_v", 1, torch.uint8, 0, send_counts=(3, 0, 2), recv_counts=(1, 1, 1))
    assert rows(uneven, 3) == [(0, 3), (3, 0), (3, 2)]
    assert rows(Call("scatter", 1, torch.uint8, 4), 2) == [(0, 4), (4, 4)]
    assert rows(Call("broadcast", 1, torch.uint8, 4), 2) == [(0, 4)]


# Disagreement.


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_a_collective_meets_a_message(kind: str) -> None:
    """All ranks hear of it long before the deadline, also the third, which did nothing wrong."""

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            getattr(comm, kind)(torch.zeros(2), 1)
        else:
            comm.allreduce(torch.zeros(2))

    started = time.monotonic()
    outcomes = run(3, job, timeout_s=90.0)
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 3
    assert f"#1 {kind}" in str(outcomes[1])
    assert "#1 allreduce" in str(outcomes[0])
    assert "on rank 0" in outcomes[2].seen
    assert "on rank 1" in outcomes[2].seen
    assert time.monotonic() - started < 60


def test_the_notice_names_both_sides_of_uneven_counts() -> None:
    calls = [
        Call("alltoall_v", 1, torch.uint8, 0, send_counts=(0, 2), recv_counts=(0, 1)),
        Call("alltoall_v", 1, torch.uint8, 0, send_counts=(1, 0), recv_counts=(2, 0)),
    ]
    notices = [Notice(call, call.agreement(), False, 8) for call in calls]
    memory_exchange.compare((0, 1), 0, notices)
    notices[0] = notices[0]._replace(call=calls[0]._replace(send_counts=(0, 3)))
    with pytest.raises(CollectiveMismatchError, match="rank 4 sends 3 elements to rank 6, which expects 2"):
        memory_exchange.compare((4, 6), 1, notices)


# Order.


def test_messages_started_together_in_the_same_order_do_not_wait_for_each_other() -> None:
    def job(comm: Communicator) -> bool:
        other = 1 - comm.rank
        output = torch.zeros(LARGE)
        receive = comm.recv(output, other, async_op=True)
        send = comm.send(torch.full((LARGE,), float(comm.rank)), other, async_op=True)
        comm.barrier()
        assert receive is not None
        assert send is not None
        return receive.wait() and send.wait() and bool((output == other).all())

    assert values(run(2, job)) == [True, True]


def test_a_synchronous_call_comes_after_the_asynchronous_ones() -> None:
    def job(comm: Communicator) -> list[float]:
        tensor = torch.ones(LARGE)
        works = [comm.allreduce(tensor, async_op=True) for _ in range(5)]
        comm.allreduce(tensor)
        done = all(work.is_completed() for work in works if work is not None)
        messages = [torch.zeros(1) for _ in range(4)]
        if comm.rank == 0:
            pending = [comm.send(torch.full((1,), float(i)), 1, async_op=True) for i in range(3)]
            comm.send(torch.full((1,), 3.0), 1)
            assert all(work.is_completed() for work in pending if work is not None)
        else:
            for message in messages:
                comm.recv(message, 0)
        return [tensor[0].item(), done, *(message.item() for message in messages)]

    assert values(run(2, job)) == [[64.0, True, 0, 0, 0, 0], [64.0, True, 0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("transport", "numel"), [(ThreadsTransport, 100), (ThreadsTransport, LARGE), (StagedTransport, 100)]
)
def test_autograd_notices_what_is_written(transport: type[ThreadsTransport], numel: int) -> None:
    """Also by a copy that torch does not see."""

    def change(comm: Communicator) -> list[bool]:
        tensor, output = torch.zeros(numel), torch.zeros(comm.size * numel)
        calls = (
            lambda: comm.allreduce(tensor),
            lambda: comm.allgather(output, tensor),
            lambda: comm.broadcast(tensor, 0),
            lambda: comm.reduce(tensor, 0),
        )
        noticed = []
        for call in calls:
            before = tensor._version, output._version
            call()
            noticed.append((tensor._version, output._version) != before)
        return noticed

    # Who only gives, to a broadcast or to a reduction, has nothing to notice.
    assert values(run(2, change, transport=transport)) == [[True, True, False, True], [True, True, True, False]]
