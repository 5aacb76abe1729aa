"""Calls are compared before they start: who disagrees learns it, who agrees is never held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua.comm.communicator import Communicator
from bagua.comm.transports import checked as checked_module
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.checked import CheckedTransport
from bagua.comm.transports.contract import Membership, Transport
from bagua.errors import CollectiveTimeoutError
from tests.comm.memory_ranks import run_on_gloo, values

pytestmark = pytest.mark.gloo


def checked(member: Membership) -> Transport:
    return CheckedTransport(C10dTransport("gloo", member), C10dTransport("gloo", member.part("check")))


# Programs that are right without checks are right with them.


def at_once(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    comm.sendrecv(tensor, mine, other, other)


def one_at_a_time(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    comm.recv(tensor, other)
    comm.send(mine, other)


def from_anybody(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    assert comm.recv_any(tensor) == other
    comm.send(mine, other)


def send_first(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    sending = comm.send(mine, other, async_op=True)
    comm.recv(tensor, other)
    sending.wait()


def receive_first(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    receiving = comm.recv(tensor, other, async_op=True)
    comm.send(mine, other)
    receiving.wait()


def in_two(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int, order: int = 1) -> None:
    works = [comm.recv(tensor, other, async_op=True), comm.send(mine, other, async_op=True)]
    for work in works[::order]:
        work.wait()


def in_two_backwards(comm: Communicator, tensor: torch.Tensor, mine: torch.Tensor, other: int) -> None:
    in_two(comm, tensor, mine, other, -1)


@pytest.mark.parametrize(
    "ways",
    [
        (send_first, send_first),
        (receive_first, receive_first),
        (at_once, in_two),
        (at_once, one_at_a_time),
        # What rank 1 tells first is not what rank 0 waits for first.
        (one_at_a_time, in_two_backwards),
        (from_anybody, receive_first),
    ],
    ids=lambda ways: " and ".join(way.__name__ for way in ways),
)
def test_ranks_may_exchange_in_ways_of_their_own(ways: tuple[Callable[..., None], Callable[..., None]]) -> None:
    def program(comm: Communicator) -> list[float]:
        tensor, other = torch.empty(2), 1 - comm.rank
        ways[comm.rank](comm, tensor, torch.full((2,), float(comm.rank)), other)
        return tensor.tolist()

    assert values(run_on_gloo(2, program, transport=checked)) == [[1.0, 1.0], [0.0, 0.0]]


def a_message_comes_after_a_collective(comm: Communicator) -> None:
    """Rank 0 waits for the message, and rank 1 in the collective, which rank 0 must start meanwhile."""
    tensor, message = torch.ones(2), torch.ones(1)
    if comm.rank == 0:
        work = comm.allreduce(tensor, async_op=True)
        comm.recv(message, 1)
        work.wait()
    else:
        comm.allreduce(tensor)
        comm.send(message, 0)
    assert tensor.equal(torch.full((2,), 2.0))


def a_collective_is_started_before_a_message_is_awaited(comm: Communicator) -> None:
    tensor, message = torch.ones(2), torch.ones(1)
    if comm.rank == 0:
        work = comm.allreduce(tensor, async_op=True)
        comm.send(message, 1)
        work.wait()
    else:
        comm.recv(message, 0)
        comm.allreduce(tensor)
    assert tensor.equal(torch.full((2,), 2.0))


@pytest.mark.parametrize(
    "program",
    [
        a_message_comes_after_a_collective,
        a_collective_is_started_before_a_message_is_awaited,
    ],
)
def test_a_correct_program_stays_correct(program: Callable[[Communicator], None]) -> None:
    values(run_on_gloo(2, program, transport=checked))


def test_a_late_rank_is_named_however_late_the_comparison_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a crowded machine the fingerprints' deadline ends long after that of the call."""
    make = checked_module.Fingerprints.__init__

    def slowly(*arguments: Any) -> None:
        time.sleep(0.15)
        make(*arguments)

    monkeypatch.setattr(checked_module.Fingerprints, "__init__", slowly)
    others = threading.Barrier(2)

    def job(comm: Communicator) -> tuple[int, ...]:
        if comm.rank == 1:
            time.sleep(0.8)
        else:
            others.wait()
        with pytest.raises(CollectiveTimeoutError) as caught:
            comm.allreduce(torch.ones(3), timeout=0.4)
        return caught.value.peers

    assert values(run_on_gloo(3, job, transport=checked)) == [(1,)] * 3
