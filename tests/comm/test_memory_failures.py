"""Ranks of shared memory that are late, give up, abort, fall silent, or are killed at any step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from bagua.comm.communicator import Communicator
from bagua.comm.transports.memory import peers as memory_peers
from bagua.comm.transports.memory.line import Deadline, LineState, Step
from bagua.comm.transports.threads import RankKilled
from bagua.errors import CollectiveTimeoutError, CommunicatorClosedError, PeerLostError
from tests.comm.memory_ranks import CALLS, LARGE, SMALL, agrees, run, values

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("call", ["allreduce", "recv", "send"])
def test_abort_wakes_everyone_with_the_reason(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 to 3 wait, in a collective or for each other; rank 0 aborts from another thread."""
    monkeypatch.setattr(memory_peers, "SLICE_S", 600.0)  # Nobody looks up without being woken.
    waiting = threading.Barrier(4)

    def job(comm: Communicator) -> None:
        waiting.wait(60)
        if comm.rank == 0:
            thread = threading.Thread(target=comm.abort, args=("enough of this",))
            thread.start()
            thread.join()
            comm.barrier()
        if call == "allreduce":
            comm.allreduce(torch.zeros(4), timeout=600)
        else:
            getattr(comm, call)(torch.zeros(4), comm.rank % 3 + 1, timeout=600)

    outcomes = run(4, job)
    assert isinstance(outcomes[0], CommunicatorClosedError)
    for error in outcomes[1:]:
        assert isinstance(error, PeerLostError)
        assert error.peers == (0,)
        assert "enough of this" in str(error)


def test_who_arrived_before_dying_has_arrived() -> None:
    """Rank 1 arrives and leaves between two looks at its line."""
    over = threading.Event()

    def job(comm: Communicator) -> object:
        if comm.rank == 1:
            comm._transport._peers.leave(LineState.LEFT, 1, "for the test")
            return over.wait(10)
        peers, looks = comm._transport._peers, iter([(1,), ()])
        soon = Deadline(time.perf_counter() + 5, 5)
        with pytest.raises(PeerLostError):
            peers.wait(lambda: (1,), soon)
        peers.wait(lambda: next(looks), soon)
        over.set()
        return next(looks, "both looks were needed")

    assert values(run(2, job)) == ["both looks were needed", True]


def test_nothing_is_received_on_a_broken_communicator() -> None:
    """A message that lies ready is not taken after an abort."""
    target, offered = torch.zeros(3), threading.Event()

    def job(comm: Communicator) -> object:
        if comm.rank == 0:
            work = comm.send(torch.ones(3), 1, async_op=True)
            assert work is not None
            time.sleep(0.05)
            comm.abort("no more")
            offered.set()
            return None
        assert offered.wait(60)
        return comm.recv(target, 0)

    assert isinstance(run(2, job)[1], PeerLostError)
    assert (target == 0).all()


def steps_of(call: tuple[str, int], size: int) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    values(run(size, lambda comm: agrees(comm, *call), fault=lambda step: seen.append((step.rank, step.number))))
    return sorted(seen)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_rank_killed_at_any_step(call: tuple[str, int]) -> None:
    """Survivors get a typed error at once, or the complete right result; and then no more calls."""
    places = steps_of(call, 3)
    assert {rank for rank, _ in places} == {0, 1, 2}
    for victim, number in places:

        def kill(step: Step, victim: int = victim, number: int = number) -> None:
            if step.rank == victim and step.number == number:
                raise RankKilled

        def job(comm: Communicator) -> tuple[object, object]:
            first = attempt(lambda: agrees(comm, *call))
            return first, attempt(comm.barrier)

        outcomes = run(3, job, fault=kill)
        assert isinstance(outcomes[victim], RankKilled)
        for survivor in {0, 1, 2} - {victim}:
            first, second = outcomes[survivor]
            assert first is True or isinstance(first, PeerLostError), (victim, number, first)
            wanted = PeerLostError if first is True else CommunicatorClosedError
            assert isinstance(second, wanted), (victim, number, second)


def attempt(function: Callable[[], object]) -> object:
    try:
        return function()
    except Exception as error:
        return error


@pytest.mark.parametrize("call", [("allreduce", LARGE), ("sendrecv", SMALL)], ids=str)
def test_a_rank_silent_at_any_step(call: tuple[str, int]) -> None:
    """Nobody waits past the deadline for a rank that stopped, and who finishes is right."""
    for victim, number in [place for place in steps_of(call, 2) if place[0] == 1]:
        release = threading.Event()

        def stop(step: Step, victim: int = victim, number: int = number, release: threading.Event = release) -> None:
            if step.rank == victim and step.number == number:
                release.wait(10)

        def job(comm: Communicator, release: threading.Event = release) -> bool:
            try:
                return agrees(comm, *call, timeout=0.15)
            finally:
                if comm.rank == 0:
                    release.set()

        outcomes = run(2, job, fault=stop)
        for outcome in outcomes:
            errors = (CollectiveTimeoutError, PeerLostError)
            assert outcome is True or isinstance(outcome, errors), (number, outcome)


@pytest.mark.parametrize(
    ("kind", "step", "numel"), [("broadcast", "pass", LARGE), ("send", "take", SMALL), ("send", "take", LARGE)]
)
def test_what_was_read_from_a_tensor_taken_back_is_not_returned(kind: str, step: str, numel: int) -> None:
    """Rank 0 gives up and reuses its tensor, while rank 1 still reads it: at the last barrier, or as a message."""
    given_up = threading.Event()

    def delay(at: Step) -> None:
        if at.rank == 1 and at.name == step and at.call.kind in ("broadcast", "recv"):
            assert given_up.wait(60)

    def job(comm: Communicator) -> None:
        tensor = torch.full((numel,), 1.0 - comm.rank)
        try:
            if kind == "broadcast":
                comm.broadcast(tensor, 0, timeout=0.1 if comm.rank == 0 else 10)
            elif comm.rank == 1:
                comm.recv(tensor, 0)
            else:
                comm.send(tensor, 1, timeout=0.1)
        finally:
            if comm.rank == 0:
                tensor.fill_(666.0)
                given_up.set()

    outcomes = run(2, job, fault=delay)
    assert isinstance(outcomes[0], CollectiveTimeoutError)
    assert isinstance(outcomes[1], CollectiveTimeoutError)
    assert outcomes[1].problem == "this rank came late: others gave the call up after 0.1 s"
