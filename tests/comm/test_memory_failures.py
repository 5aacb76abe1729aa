"""Ranks of shared memory that are late, give up, fall silent, are killed, or wait for each other in different calls."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from bagua.comm import Call, Communicator
from bagua.comm.transports.memory.line import Deadline, LineState, Step, Words
from bagua.comm.transports.memory.transport import MemoryTransport, Messages
from bagua.comm.transports.threads import RankKilled, ThreadPeers
from bagua.errors import CollectiveMismatchError, CollectiveTimeoutError, CommunicatorClosedError, PeerLostError
from tests.comm.memory_ranks import CALLS, LARGE, SMALL, agrees, on_communicators, run, values
from tests.harness import in_threads

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("call", ["allreduce", "recv", "send"])
def test_abort_wakes_everyone_with_the_reason(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1 to 3 wait, in a collective or for each other; rank 0 aborts from another thread."""
    monkeypatch.setattr("bagua.comm.transports.memory.peers.SLICE_S", 600.0)  # Nobody looks up without being woken.
    waiting = threading.Barrier(4)

    def job(comm: Communicator) -> None:
        waiting.wait(60)
        if comm.rank == 0:
            in_threads(1, lambda _: comm.abort("enough of this"))
            comm.barrier()
        if call == "allreduce":
            comm.allreduce(torch.zeros(4), timeout=600)
        else:
            getattr(comm, call)(torch.zeros(4), comm.rank % 3 + 1, timeout=600)

    own, *others = run(4, job)
    assert isinstance(own, CommunicatorClosedError)
    for error in others:
        assert (type(error), error.peers) == (PeerLostError, (0,))
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

    def attempt(function: Callable[[], object]) -> object:
        try:
            return function()
        except Exception as error:
            return error

    def job(comm: Communicator) -> tuple[object, object]:
        return attempt(lambda: agrees(comm, *call)), attempt(comm.barrier)

    for place in places:

        def kill(step: Step, place: tuple[int, int] = place) -> None:
            if (step.rank, step.number) == place:
                raise RankKilled

        outcomes = run(3, job, fault=kill)
        assert isinstance(outcomes.pop(place[0]), RankKilled)
        for first, second in outcomes:
            assert first is True or isinstance(first, PeerLostError), (place, first)
            wanted = PeerLostError if first is True else CommunicatorClosedError
            assert isinstance(second, wanted), (place, second)


@pytest.mark.parametrize("call", [("allreduce", LARGE), ("sendrecv", SMALL)], ids=str)
def test_a_rank_silent_at_any_step(call: tuple[str, int]) -> None:
    """Nobody waits past the deadline for a rank that stopped, and who finishes is right."""
    for number in [number for rank, number in steps_of(call, 2) if rank == 1]:
        release = threading.Event()

        def stop(step: Step, number: int = number, release: threading.Event = release) -> None:
            if (step.rank, step.number) == (1, number):
                release.wait(10)

        def job(comm: Communicator, release: threading.Event = release) -> bool:
            try:
                return agrees(comm, *call, timeout=0.15)
            finally:
                if comm.rank == 0:
                    release.set()

        for outcome in run(2, job, fault=stop):
            assert outcome is True or isinstance(outcome, (CollectiveTimeoutError, PeerLostError)), (number, outcome)


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
    assert [type(outcome) for outcome in outcomes] == [CollectiveTimeoutError] * 2
    assert outcomes[1].problem == "this rank came late: others gave the call up after 0.1 s"


Program = Callable[[Communicator], Any]


def gradients_beside(exchange: Callable[[Communicator, torch.Tensor], object]) -> Program:
    """Rank 1 has its collective in the background while it waits for a message, or until one is taken."""

    def program(comm: Communicator) -> float:
        tensor, message = torch.ones(4), torch.zeros(3)
        work = comm.allreduce(tensor, async_op=comm.rank == 1)
        exchange(comm, message)
        if work is not None:
            work.wait()
        return tensor.sum().item() + message.sum().item()

    return program


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
    else:
        work = comm.send(torch.zeros(3), 1, async_op=True)
        comm.allreduce(tensor)
        comm.send(message.fill_(1.0), 1)
    work.wait()
    return tensor.sum().item() + message.sum().item()


LEGAL: dict[str, Program] = {
    "a stage receives": gradients_beside(
        lambda comm, message: comm.recv(message, 0) if comm.rank else comm.send(message.fill_(1.0), 1)
    ),
    "a stage sends": gradients_beside(
        lambda comm, message: comm.send(message.fill_(1.0), 0) if comm.rank else comm.recv(message, 1)
    ),
    "stages exchange": gradients_beside(
        lambda comm, message: comm.sendrecv(message, torch.ones(3), 1 - comm.rank, 1 - comm.rank)
    ),
    "a message each way": a_message_each_way,
    "two messages": two_messages,
}


class Watch:
    """Looks on behalf of rank 0 at every line that a thread of rank 1 runs while rank 0 waits in its collective."""

    def __init__(self) -> None:
        self.transport: MemoryTransport | None = None
        self.waits_in: Call | None = None
        self.looks, self.callers = 0, set[int]()
        self.found: list[CollectiveMismatchError] = []

    def run(self, program: Program, hold: Callable[[Step], None] = lambda step: None) -> list[Any]:
        """The outcomes of ``program`` on two ranks; ``hold`` is told of each step."""

        def fault(step: Step) -> None:
            if step.rank == 0 and step.call.kind == "allreduce":
                self.waits_in = step.call if step.name == "arrive" else None
            hold(step)

        def job(comm: Communicator) -> Any:
            if comm.rank == 0:
                self.transport = comm._transport
            else:
                self.callers.add(threading.get_ident())
                sys.settrace(self.trace)
            return program(comm)

        return run(2, job, fault=fault, timeout_s=20.0)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        of_rank_1 = threading.get_ident() in self.callers or "-world-1-" in threading.current_thread().name
        return self._line if of_rank_1 and frame.f_globals.get("__name__", "").startswith("bagua.comm") else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        transport, call = self.transport, self.waits_in
        if event == "line" and transport and call and transport._peers.own.words[Words.ARRIVED]:
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


class Late:
    """Holds the lane of rank 1 at a step until its caller is blocked in a message and rank 0 has looked twice."""

    def __init__(self, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at, self.looks, self.looker = at, 0, 0
        self.asleep, self.lane_asleep, self.go_on = (threading.Event() for _ in range(3))
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
def test_a_legal_program_is_never_suspected(program: str, watch: Watch) -> None:
    assert values(watch.run(LEGAL[program])) == [11.0, 11.0]
    assert watch.found == []


@pytest.mark.parametrize(
    ("program", "late", "at"),
    [
        *((name, Late, at) for name in LEGAL if name != "a message each way" for at in ("publish", "arrive", "pass")),
        ("a message each way", LateToTake, ""),
    ],
)
def test_nor_is_it_when_the_collective_is_late_or_a_lane_takes_late(program, late, at, watch, monkeypatch) -> None:
    held = late(at, monkeypatch)
    assert values(watch.run(LEGAL[program], held)) == [11.0, 11.0]
    assert watch.found == []
    assert at == "pass" or (held.looks >= 2 and watch.looks)


def test_who_announces_too_early_is_found(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def announcing(messages: Messages, missing: Callable[[], tuple[int, ...]], awaited: int) -> Any:
        messages._peers.own.words[Words.AWAITED] = awaited
        return missing

    monkeypatch.setattr(Messages, "_announcing", announcing)
    first, _ = watch.run(LEGAL["a stage receives"], Late("arrive", monkeypatch))
    assert isinstance(first, CollectiveMismatchError)


def test_who_takes_one_direction_for_the_other_is_found(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def awaited_slot(transport: MemoryTransport, other: int) -> int | None:
        places, own = transport._peers.places, transport._peers.own.words
        words = transport._peers.lines[other].words
        asks = words[places.wanted + transport.rank] > own[places.sent + other]
        stuck = words[Words.AWAITED] and asks and transport._lanes.idle(("send", other))
        return transport._peers.slots.incoming(transport.rank) if stuck else None

    monkeypatch.setattr(MemoryTransport, "_awaited_slot", awaited_slot)
    first, _ = watch.run(a_message_each_way, LateToTake("", monkeypatch))
    assert isinstance(first, CollectiveMismatchError)


@pytest.mark.parametrize("at", ["publish", "arrive", "pass"])
@pytest.mark.parametrize("kind", ["recv", "send"])
def test_ranks_that_wait_for_each_other_are_told_after_the_collective(kind: str, at: str, monkeypatch) -> None:
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


@on_communicators(2)
def test_a_message_that_was_served_by_a_lane_is_no_reason(comm: Communicator) -> None:
    """Rank 0 serves in the background all that rank 1 waits for, while it waits in a collective."""
    message, tensor = torch.zeros(3), torch.ones(4)
    if comm.rank == 1:
        for _ in range(3):
            comm.recv(message, 0)
        comm.allreduce(tensor)
        assert message.sum().item() == 3.0
    else:
        works = [comm.send(torch.ones(3), 1, async_op=True) for _ in range(3)]
        comm.allreduce(tensor)
        assert [work.exception() for work in works] == [None] * 3
