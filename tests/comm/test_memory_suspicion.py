"""Two ranks that wait for each other in different calls are told so; ranks of a legal program never are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from bagua.comm.call import Call
from bagua.comm.communicator import Communicator
from bagua.comm.transports.memory.line import Step, Words
from bagua.comm.transports.memory.messages import Messages
from bagua.comm.transports.memory.transport import MemoryTransport
from bagua.comm.transports.threads import ThreadPeers
from bagua.errors import CollectiveMismatchError
from tests.comm.memory_ranks import run, values

pytestmark = pytest.mark.threads

Program = Callable[[Communicator], Any]


def gradients_while_a_message_goes_to(receiver: int, comm: Communicator) -> float:
    """Rank 1 has its collective in the background while it waits for a message, or until one is taken."""
    tensor, message, other = torch.ones(4), torch.zeros(3), 1 - comm.rank
    work = comm.allreduce(tensor, async_op=comm.rank == 1)
    if comm.rank == receiver:
        comm.recv(message, other)
    else:
        comm.send(message.fill_(1.0), other)
    if work is not None:
        work.wait()
    return tensor.sum().item() + message.sum().item()


def gradients_while_a_stage_receives(comm: Communicator) -> float:
    return gradients_while_a_message_goes_to(1, comm)


def gradients_while_a_stage_sends(comm: Communicator) -> float:
    return gradients_while_a_message_goes_to(0, comm)


def gradients_while_stages_exchange(comm: Communicator) -> float:
    tensor, message, other = torch.ones(4), torch.zeros(3), 1 - comm.rank
    work = comm.allreduce(tensor, async_op=comm.rank == 1)
    comm.sendrecv(message, torch.ones(3), other, other)
    if work is not None:
        work.wait()
    return tensor.sum().item() + message.sum().item()


def a_message_each_way(comm: Communicator) -> float:
    """Rank 1 waits until rank 0 takes a message, while it asks rank 0 for one that comes later."""
    tensor, message, other = torch.ones(4), torch.zeros(3), 1 - comm.rank
    receive = comm.recv(message, other, async_op=True)
    if comm.rank == 1:
        comm.send(torch.ones(3), 0)
        comm.allreduce(tensor)
    else:
        comm.allreduce(tensor)
        comm.send(torch.ones(3), 1)
    receive.wait()
    return tensor.sum().item() + message.sum().item()


def two_messages(comm: Communicator) -> float:
    tensor, message = torch.ones(4), torch.zeros(3)
    if comm.rank == 1:
        work = comm.allreduce(tensor, async_op=True)
        comm.recv(message, 0)
        comm.recv(message, 0)
        work.wait()
        return tensor.sum().item() + message.sum().item()
    send = comm.send(torch.zeros(3), 1, async_op=True)
    comm.allreduce(tensor)
    comm.send(torch.ones(3), 1)
    send.wait()
    return tensor.sum().item() + 3


LEGAL: list[Program] = [
    gradients_while_a_stage_receives,
    gradients_while_a_stage_sends,
    gradients_while_stages_exchange,
    a_message_each_way,
    two_messages,
]


class Watch:
    """Looks on behalf of rank 0 at every line that a thread of rank 1 runs while rank 0 waits in its collective."""

    def __init__(self) -> None:
        self.transport: MemoryTransport | None = None
        self.waits_in: Call | None = None
        self.looks = 0
        self.found: list[CollectiveMismatchError] = []
        self._callers: set[int] = set()

    def joined(self, comm: Communicator) -> None:
        if comm.rank == 0:
            self.transport = comm._transport
        else:
            self._callers.add(threading.get_ident())

    def fault(self, step: Step) -> None:
        if step.rank == 0 and step.call.kind == "allreduce":
            self.waits_in = step.call if step.name == "arrive" else None

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        of_rank_1 = threading.get_ident() in self._callers or "-world-1-" in threading.current_thread().name
        return self._line if of_rank_1 and name.startswith("bagua.comm") else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        transport, call = self.transport, self.waits_in
        if event == "line" and transport is not None and call is not None:
            words = transport._peers.own.words
            if words[Words.ARRIVED]:
                self.looks += 1
                error = transport._suspect(call)
                if error is not None and self.waits_in is call:
                    self.found.append(error)
        return self._line


@pytest.fixture
def watch() -> Iterator[Watch]:
    seen = Watch()
    before = threading.gettrace()
    threading.settrace(seen.trace)
    yield seen
    threading.settrace(before)


def watched(program: Program, watch: Watch, hold: Callable[[Step], None] = lambda step: None) -> list[Any]:
    def fault(step: Step) -> None:
        watch.fault(step)
        hold(step)

    def job(comm: Communicator) -> Any:
        watch.joined(comm)
        if comm.rank == 1:
            sys.settrace(watch.trace)
        return program(comm)

    return run(2, job, fault=fault, timeout_s=20.0)


class Late:
    """Holds the lane of rank 1 at a step until its caller is blocked in a message and rank 0 has looked twice."""

    def __init__(self, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = at
        self.asleep, self.lane_asleep, self.go_on = threading.Event(), threading.Event(), threading.Event()
        self.looks, self.looker = 0, 0
        pause, suspect = ThreadPeers.pause, MemoryTransport._suspect

        def paused(peers: ThreadPeers, ready: Callable[[], bool], seconds: float) -> None:
            if peers.rank == 1:
                in_a_lane = "-world-1-" in threading.current_thread().name
                (self.lane_asleep if in_a_lane else self.asleep).set()
            pause(peers, ready, seconds)

        def suspected(transport: MemoryTransport, call: Call) -> Any:
            asleep = threading.get_ident() == self.looker and self.asleep.is_set()
            error = suspect(transport, call)
            self.looks += asleep
            if self.looks >= 2:
                self.go_on.set()
            return error

        monkeypatch.setattr(ThreadPeers, "pause", paused)
        monkeypatch.setattr(MemoryTransport, "_suspect", suspected)

    def __call__(self, step: Step) -> None:
        if step.rank == 0 and step.name == "arrive":
            self.looker = threading.get_ident()
        if step.rank == 0 and step.name == "pass":
            self.go_on.set()  # Rank 0 looks no more.
        if step.rank == 1 and step.call.kind == "allreduce" and step.name == self.at:
            assert self.go_on.wait(60)


class LateToTake(Late):
    """Rank 1 asks for the later message first, and rank 0 looks twice before its lane takes the earlier one."""

    def __call__(self, step: Step) -> None:
        super().__call__(step)
        if step.rank == 1 and step.name == "offer":
            assert self.lane_asleep.wait(60)
        if step.rank == 0 and step.name == "take":
            assert self.go_on.wait(60)


@pytest.mark.parametrize("program", LEGAL)
def test_a_legal_program_is_never_suspected(program: Program, watch: Watch) -> None:
    assert values(watched(program, watch)) == [11.0, 11.0]
    assert watch.found == []


@pytest.mark.parametrize("at", ["publish", "arrive", "pass"])
@pytest.mark.parametrize("program", [program for program in LEGAL if program is not a_message_each_way])
def test_nor_is_it_when_the_collective_is_late(
    program: Program, at: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(at, monkeypatch)
    assert values(watched(program, watch, late)) == [11.0, 11.0]
    assert watch.found == []
    assert at == "pass" or (late.looks >= 2 and watch.looks)


def test_nor_is_it_when_a_lane_takes_late(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateToTake("", monkeypatch)
    assert values(watched(a_message_each_way, watch, late)) == [11.0, 11.0]
    assert watch.found == []
    assert late.looks >= 2


# The same tests find detectors that are wrong.


def test_who_announces_too_early_is_found(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def announcing(messages: Messages, missing: Callable[[], tuple[int, ...]], awaited: int) -> Any:
        messages._peers.own.words[Words.AWAITED] = awaited
        return missing

    monkeypatch.setattr(Messages, "_announcing", announcing)
    outcomes = watched(gradients_while_a_stage_receives, watch, Late("arrive", monkeypatch))
    assert isinstance(outcomes[0], CollectiveMismatchError)


def test_who_takes_one_direction_for_the_other_is_found(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def awaited_slot(transport: MemoryTransport, other: int) -> int | None:
        places, own = transport._peers.places, transport._peers.own.words
        words = transport._peers.lines[other].words
        asks = words[places.wanted + transport.rank] > own[places.sent + other]
        stuck = words[Words.AWAITED] and asks and transport._lanes.idle(("send", other))
        return transport._peers.slots.incoming(transport.rank) if stuck else None

    late = LateToTake("", monkeypatch)
    monkeypatch.setattr(MemoryTransport, "_awaited_slot", awaited_slot)
    outcomes = watched(a_message_each_way, watch, late)
    assert isinstance(outcomes[0], CollectiveMismatchError)


# True cycles.


@pytest.mark.parametrize("at", ["publish", "arrive", "pass"])
@pytest.mark.parametrize("kind", ["recv", "send"])
def test_ranks_that_wait_for_each_other_are_told_after_the_collective(
    kind: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits for a message when its collective was late and is complete; rank 0 never sends one."""

    def job(comm: Communicator) -> None:
        work = comm.allreduce(torch.ones(4), async_op=comm.rank == 1)
        if comm.rank == 0:
            comm.barrier()
        else:
            getattr(comm, kind)(torch.zeros(3), 0)
            work.wait()

    outcomes = run(2, job, fault=Late(at, monkeypatch), timeout_s=25.0)
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatchError] * 2
    assert "barrier" in str(outcomes[0])
    assert kind in str(outcomes[0])


def test_a_message_that_was_served_by_a_lane_is_no_reason() -> None:
    """Rank 0 serves in the background all that rank 1 waits for, while it waits in a collective."""

    def job(comm: Communicator) -> float:
        message, tensor = torch.zeros(3), torch.ones(4)
        if comm.rank == 1:
            for _ in range(3):
                comm.recv(message, 0)
            comm.allreduce(tensor)
            return message.sum().item()
        works = [comm.send(torch.ones(3), 1, async_op=True) for _ in range(3)]
        comm.allreduce(tensor)
        return float(sum(work.exception() is None for work in works))

    assert values(run(2, job)) == [3.0, 3.0]
