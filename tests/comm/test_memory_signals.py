"""What a signal handler may do, at each line of the call that it interrupts: abort, close, raise."""

import functools
import gc
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import settings

from bagua.comm import BackgroundThread, Communicator
from bagua.comm.transports.memory.line import LineState, Words
from bagua.comm.transports.memory.peers import Peers
from bagua.comm.transports.memory.transport import Messages
from bagua.comm.transports.shm.attach import DescriptorChannel
from bagua.comm.transports.shm.transport import Outbox, ShmPeers, ShmTransport
from bagua.comm.transports.threads import ThreadsTransport
from bagua.errors import CommunicationError, CommunicatorClosedError, PeerLostError
from tests.comm.memory_ranks import LARGE, run

pytestmark = pytest.mark.threads

#: A module and a line in it.
Location = tuple[str, int]
Job = Callable[[Communicator], None]
#: Modules whose lines are interrupted, and those above them, which do the same on each transport.
TRANSPORT = ("lifetime", "transports")
ABOVE = ("communicator", "pipeline", "records", "work")


_small_areas = pytest.fixture(lambda monkeypatch: monkeypatch.setenv("BAGUA_SHM_STAGING_BYTES", "65536"), autouse=True)


class InterruptionError(Exception):
    """What a signal handler raises."""


def allreduce(comm: Communicator) -> None:
    comm.allreduce(torch.ones(4))


def allreduce_large(comm: Communicator) -> None:
    comm.allreduce(torch.ones(LARGE))


def message(comm: Communicator, sender: int = 1) -> None:
    move = comm.send if comm.rank == sender else comm.recv
    move(torch.ones(LARGE), 1 - comm.rank)


def message_back(comm: Communicator) -> None:
    message(comm, sender=0)


def in_background(comm: Communicator) -> None:
    comm.allreduce(torch.ones(4), async_op=True).wait()


def failing(comm: Communicator) -> None:
    """Ranks disagree: the handler may come while the rank tells the other."""
    comm.allreduce(torch.ones(4 + comm.rank))


CALLS = [allreduce, allreduce_large, message, message_back, in_background, failing]
#: Hundreds of lines, each with ranks of its own.
LONG = (allreduce_large, message, message_back)
THOROUGH = settings.get_current_profile_name() == "thorough"
CASES = [
    pytest.param(transport, call, id=f"{transport.name}-{call.__name__}")
    for transport in (ThreadsTransport, ShmTransport)
    for call in CALLS
    if THOROUGH or transport is ThreadsTransport or call not in LONG
]


def interruptible(transport: type, call: Job) -> tuple[str, ...]:
    """Modules whose lines are interrupted: those above the transport once for all transports and lengths."""
    return (*ABOVE, *TRANSPORT) if THOROUGH or (transport is ThreadsTransport and call not in LONG) else TRANSPORT


def test_what_is_interrupted_exists() -> None:
    assert all(importlib.util.find_spec(f"bagua.comm.{name}") for name in (*ABOVE, *TRANSPORT))


@dataclass
class Signals:
    """Runs ``handler`` at one line of the call of rank 0, the first time that it comes there."""

    at: Location | None
    handler: Job
    modules: tuple[str, ...]
    seen: dict[Location, None] = field(default_factory=dict)
    comm: Communicator | None = None
    #: Rank 1 comes when rank 0 has gone to sleep twice, or was interrupted.
    come: threading.Event = field(default_factory=threading.Event)
    sleeps: int = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("bagua.comm.") or not name[len("bagua.comm.") :].startswith(self.modules):
            return None
        if frame.f_code.co_name == "pause":
            self.sleeps += 1
        if self.sleeps > 1 or (frame.f_code.co_name, name) == ("wait", "bagua.comm.transports.memory.lanes"):
            self.come.set()
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        place = (frame.f_globals["__name__"], frame.f_lineno)
        if event == "line" and place not in self.seen:
            self.seen[place] = None
            if place == self.at:
                self.come.set()
                assert self.comm is not None
                self.handler(self.comm)
        return self._line


def interrupted(transport: type, call: Job, at: Location | None, handler: Job) -> tuple[list[Any], Signals]:
    """How the calls of both ranks end, if rank 0 is interrupted at a line of its own."""
    signals = Signals(at, handler, interruptible(transport, call))

    def job(comm: Communicator) -> object:
        if comm.rank == 1:
            assert signals.come.wait(60)
            return attempt(comm)
        signals.comm = comm
        sys.settrace(signals)
        try:
            return attempt(comm)
        finally:
            signals.come.set()

    def attempt(comm: Communicator) -> object:
        try:
            call(comm)
        except (CommunicationError, InterruptionError) as error:
            return error
        finally:
            sys.settrace(None)
            if comm.rank == 1:
                comm.close()
        return None

    return run(2, job, transport=transport, timeout_s=10.0, close=False), signals


def places(transport: type, call: Job) -> list[Location]:
    """The lines of the call of rank 0 at which a handler may come, its waits included."""
    _, signals = interrupted(transport, call, None, lambda comm: None)
    assert signals.comm is not None
    signals.comm.close()
    return list(signals.seen)


def descriptors() -> dict[str, str]:
    """What is open, by number: a failure shows what has come."""
    folder = Path("/proc/self/fd")
    return {name: os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).is_symlink()}


@pytest.mark.parametrize(("transport", "call"), CASES)
def test_a_handler_may_abort_and_close_anywhere(transport: type, call: Job) -> None:
    """What the call uses stays until it ends, and is given back then."""

    def close(comm: Communicator) -> None:
        comm.abort("by the handler")
        assert comm._transport._peers.own.words[Words.STATE] != LineState.OPEN
        comm.close()

    found = places(transport, call)
    before = descriptors()
    for place in found:
        outcomes, signals = interrupted(transport, call, place, close)
        for outcome in outcomes:
            assert outcome is None or isinstance(outcome, CommunicationError), (place, outcomes)
        signals.comm.close()  # Where the handler did not come; otherwise this does nothing.
    gc.collect()
    after = descriptors()
    assert len(after) <= len(before), sorted(after.items() - before.items())


#: What is interrupted while it waits, or moves data for those who wait.
WAITING = (Peers, Messages, ShmPeers, Outbox, DescriptorChannel)


@functools.cache  # To find a class, its module is parsed.
def lines_of(kind: type) -> set[Location]:
    lines, first = inspect.getsourcelines(kind)
    return {(kind.__module__, first + number) for number in range(len(lines))}


@pytest.mark.parametrize("call", [allreduce, message])
def test_a_handler_may_raise_where_the_call_waits(call: Job) -> None:
    """As Ctrl-C does. The other rank is told, no sleeper is counted any more, and nothing is left open."""

    def stop(comm: Communicator) -> None:
        raise InterruptionError

    found = [place for place in places(ShmTransport, call) if any(place in lines_of(kind) for kind in WAITING)]
    before, lost = descriptors(), 0
    for place in found:
        outcomes, signals = interrupted(ShmTransport, call, place, stop)
        for outcome in outcomes:
            assert outcome is None or isinstance(outcome, CommunicationError | InterruptionError), (place, outcomes)
        peers = signals.comm._transport._shm_peers
        assert peers.own.words[peers._sleepers_word] == 0, place
        signals.comm.close()
        assert peers._closed
        # A descriptor that has just been received and has no name yet is lost.
        lost += place in lines_of(DescriptorChannel)
    gc.collect()
    after = descriptors()
    assert len(after) <= len(before) + lost, sorted(after.items() - before.items())


def test_a_lane_that_a_handler_stops_runs_no_more() -> None:
    """Whatever line of ``submit`` the handler interrupts: the task runs, or is refused."""
    lines, first = inspect.getsourcelines(BackgroundThread.submit)
    for number in range(first, first + len(lines)):
        background = BackgroundThread("test")

        def trace(frame: FrameType, event: str, _: Any, number: int = number, thread: Any = background) -> Any:
            if frame.f_code is not BackgroundThread.submit.__code__:
                return None
            if event == "line" and frame.f_lineno == number:
                thread.stop(0.0)
            return trace

        sys.settrace(trace)
        try:
            future = background.submit(lambda: "done")
        except RuntimeError:
            future = None
        finally:
            sys.settrace(None)
        assert future is None or future.result(10) == "done", number
        assert background.stop(10)


@pytest.mark.parametrize("transport", [ThreadsTransport, ShmTransport], ids=lambda each: each.name)
def test_any_text_is_a_reason(transport: type) -> None:
    """Names of files hold what is no valid text; nobody waits for that."""
    reason = os.fsdecode(b"cannot read data-\xff.bin")

    def job(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort(reason)
        try:
            comm.allreduce(torch.ones(4))
        finally:
            comm.close()

    outcomes = run(2, job, transport=transport, timeout_s=20.0)
    assert [*map(type, outcomes)] == [CommunicatorClosedError, PeerLostError]
    assert "cannot read data-" in str(outcomes[1])
