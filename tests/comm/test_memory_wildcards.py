"""Receives from any rank on shared memory: who is missed, and in which order messages are taken."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua.comm.communicator import Communicator
from bagua.comm.transports.memory.line import Step
from bagua.comm.transports.threads import RankKilled
from bagua.errors import CommunicationError, ConcurrentUseError, PeerLostError
from tests.comm.memory_ranks import run, values

pytestmark = pytest.mark.threads


def test_ranks_that_closed_in_peace_are_not_missed_until_none_is_left() -> None:
    gone = threading.Event()

    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            comm.close()
            gone.set()
            return None
        if comm.rank == 2:
            gone.wait(10)
            comm.send(torch.ones(1), 0)
            comm.close()
            return None
        gone.wait(10)
        first = comm.recv_any(torch.zeros(1))
        with pytest.raises(PeerLostError, match="it closed its communicator"):
            comm.recv_any(torch.zeros(1))
        return first

    assert values(run(3, part, close=False))[0] == 2


@pytest.mark.parametrize("step", ["offer", "settle"])
def test_a_sender_that_dies_is_an_error_of_the_receiver(step: str) -> None:
    def fault(at: Step) -> None:
        if at.rank == 1 and at.name == step:
            raise RankKilled

    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            comm.send(torch.ones(1), 0)
        return comm.recv_any(torch.zeros(1), timeout=5.0)

    received, _ = run(2, part, fault=fault)
    assert isinstance(received, PeerLostError) or (step == "settle" and received == 1), f"{received!r}"


def test_receives_by_name_that_come_later_wait_for_the_message_that_is_not_theirs() -> None:
    """The lane of the named receive is quicker here: it begins before the wildcard is looked at."""
    slow, named = threading.Event(), threading.Event()

    def fault(at: Step) -> None:
        if at.rank == 0 and at.name == "want" and not slow.is_set():
            slow.set()
            named.wait(0.2)  # The wildcard is about to take its message, and stops here.

    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            for number in (1.0, 2.0):
                comm.send(torch.tensor([number]), 0)
            return None
        tensors = torch.zeros(1), torch.zeros(1)
        works = comm.recv_any(tensors[0], async_op=True), comm.recv(tensors[1], 1, async_op=True)
        for work in works:
            assert work is not None
            assert not isinstance(work, int)
            work.wait()
        return [tensor.item() for tensor in tensors]

    assert values(run(2, part, fault=fault))[0] == [1.0, 2.0]


def test_messages_are_exchanged_while_one_from_any_rank_is_awaited() -> None:
    def part(comm: Communicator) -> object:
        other = 1 - comm.rank
        tensors = torch.zeros(1), torch.zeros(1)
        work = comm.recv_any(tensors[0], async_op=True)
        assert work is not None
        assert not isinstance(work, int)
        both = comm.sendrecv(tensors[1], torch.tensor([5.0]), other, other, async_op=True)
        comm.send(torch.tensor([7.0]), other)
        assert both is not None
        both.wait()
        assert work.result() == other
        return [tensor.item() for tensor in tensors]

    assert values(run(2, part)) == [[5.0, 7.0]] * 2


def test_a_broken_communicator_ends_the_wait() -> None:
    waiting = threading.Event()

    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            waiting.wait(10)
            comm.abort("because of this test")
            return None
        work = comm.recv_any(torch.zeros(1), async_op=True)
        assert not isinstance(work, int)
        waiting.set()
        with pytest.raises(CommunicationError, match="because of this test"):
            work.wait()
        return None

    values(run(2, part))


def test_a_receive_that_was_not_started_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def part(comm: Communicator) -> object:
        if comm.rank == 1:
            comm.send(torch.ones(1), 0)
            return None
        lanes = comm._transport._lanes
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "submit", refuse)
            with pytest.raises(ConcurrentUseError):
                comm.recv_any(torch.zeros(1))
        message = torch.zeros(1)
        comm.recv(message, 1, timeout=5.0)
        return message.item()

    assert values(run(2, part))[0] == 1.0


def refuse(*_: object) -> None:
    raise ConcurrentUseError("in the middle of another call")
