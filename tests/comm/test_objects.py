"""Calls on objects, which are made of several: what an error in the middle of one leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua.comm import composed, get_default_group
from bagua.comm.communicator import Communicator
from bagua.errors import CollectiveMismatchError, CommunicatorClosedError, ConfigurationError, PeerLostError
from bagua.testing import ThreadRanks
from tests.comm.memory_ranks import run_on_gloo, values


def on_threads(size: int, job: Callable[[Communicator], Any]) -> list[Any]:
    return ThreadRanks(size).run(lambda: job(get_default_group().global_communicator))


def on_gloo(size: int, job: Callable[[Communicator], Any]) -> list[Any]:
    return values(run_on_gloo(size, job))


WAYS = [pytest.param(on_threads, marks=pytest.mark.threads), pytest.param(on_gloo, marks=pytest.mark.gloo)]


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_between_two_messages_breaks_the_communicator(
    run: Callable[..., list[Any]], error: type[BaseException], asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next message would be taken for the rest of the object."""
    real = composed._ObjectCalls.room

    def fails(calls: composed._ObjectCalls, length: int, sender: int) -> torch.Tensor:
        if calls.communicator.rank == 1:
            raise error("in the middle")
        return real(calls, length, sender)

    monkeypatch.setattr(composed._ObjectCalls, "room", fails)

    def job(comm: Communicator) -> tuple[bool, str]:
        if comm.rank == 1:
            with pytest.raises(error, match="in the middle"):
                work = comm.broadcast_object(None, 0, async_op=asynchronous)
                work.wait()
            with pytest.raises(CommunicatorClosedError, match="in the middle"):
                comm.broadcast(torch.zeros(3), 0)
            return comm.usable, ""
        with pytest.raises(PeerLostError) as lost:
            for _ in range(3):  # A sender may be done with the object before it hears of that.
                comm.broadcast_object(["secret"] * 3, 0)
                comm.barrier()
        return comm.usable, str(lost.value)

    (usable, said), (others_usable, _) = run(2, job)
    assert not usable
    assert not others_usable
    assert f"{error.__name__}: in the middle" in said


@pytest.mark.threads
def test_an_object_that_cannot_be_read_leaves_the_communicator_as_it_is() -> None:
    def job(comm: Communicator) -> list[float]:
        with pytest.raises(ConfigurationError if comm.rank else ZeroDivisionError):
            comm.broadcast_object(Poisoned(), 0, allow_pickle=not comm.rank)
            1 / 0  # noqa: B018 - rank 0 has sent it
        return comm.allreduce(torch.ones(1)) or [float(comm.usable)]

    assert on_threads(2, job) == [[1.0], [1.0]]


class Poisoned:
    """Travels as pickle only."""


@pytest.mark.threads
def test_an_error_of_an_object_waits_for_those_who_ask() -> None:
    """A call that follows is made, whatever became of the one before it."""

    def job(comm: Communicator) -> tuple[list[float], str, bool]:
        work = comm.gather_object((lambda: 0) if comm.rank == 2 else 1, 0, async_op=True)
        tensor = torch.ones(2)
        comm.allreduce(tensor)
        problem = work.exception()
        return tensor.tolist(), type(problem).__name__, comm.usable

    found = on_threads(4, job)
    failed, none = ([4.0, 4.0], "ConfigurationError", True), ([4.0, 4.0], "NoneType", True)
    assert found == [failed, none, failed, none]


@pytest.mark.threads
@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([torch.tensor([-1])], "rank 1 announces"),
        ([torch.tensor([2**62])], "rank 1 announces"),
        ([torch.tensor([3]), torch.ones(3, dtype=torch.uint8)], "bytes of rank 1 are no object"),
    ],
    ids=["negative length", "large length", "no object"],
)
def test_what_is_no_object_is_an_error_that_names_the_sender(messages: list[torch.Tensor], problem: str) -> None:
    def job(comm: Communicator) -> tuple[int, ...]:
        if comm.rank == 1:
            for message in messages:
                comm.send(message, 0)
            return (1,)
        with pytest.raises(CollectiveMismatchError, match=problem) as caught:
            comm.recv_object(1)
        return caught.value.peers

    assert on_threads(2, job) == [(1,), (1,)]
