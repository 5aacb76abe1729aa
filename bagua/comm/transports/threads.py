"""Ranks that are threads of one process: the reference transport, and the everyday way to test."""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator

import torch

from bagua.comm.call import Call
from bagua.comm.store.asking import gather_values, raise_refusals
from bagua.comm.transports.contract import Data, Handle, Membership
from bagua.comm.transports.memory.lanes import Lanes
from bagua.comm.transports.memory.line import FaultHook, Line, Notice, RankKilled, Slots, Step, Words
from bagua.comm.transports.memory.peers import Peers
from bagua.comm.transports.memory.transport import MemoryTransport

__all__ = ["FaultHook", "RankKilled", "Step", "ThreadPeers", "ThreadsTransport", "current_fault", "inject_fault"]

_fault: contextvars.ContextVar[FaultHook | None] = contextvars.ContextVar("bagua-fault", default=None)


@contextlib.contextmanager
def inject_fault(fault: FaultHook | None) -> Iterator[None]:
    """Give ``fault`` to every transport over shared memory that is built in this context.

    Args:
        fault: called at each step; raises ``RankKilled`` to kill a rank, sleeps to
            delay it, waits for another rank's step to order them.

    Example:
        >>> with inject_fault(lambda step: print(step.rank, step.name)):
        ...     pass  # build the ranks here
    """
    token = _fault.set(fault)
    try:
        yield
    finally:
        _fault.reset(token)


def current_fault() -> FaultHook | None:
    """The hook of this context, for a transport that is being built."""
    return _fault.get()


class ThreadLine(Line):
    """A line whose views are the published tensors themselves."""

    reason: str = ""

    def __init__(self, size: int) -> None:
        self.words: list[int] = [0] * Words(size).count
        self.notices: list[Notice | None] = [None] * Slots(size).count
        self.data: list[torch.Tensor | None] = [None] * Slots(size).count
        #: The threads that are this rank: the one that built it, and the one that made its latest call.
        self.builder: threading.Thread | None = None
        self.caller: threading.Thread | None = None
        self.lanes: Lanes | None = None
        #: One lock per sleeping thread of this rank; the thread that takes it out releases it.
        self.bells: list[threading.Lock] = []

    def notice(self, slot: int) -> Notice:
        notice = self.notices[slot]
        assert notice is not None
        return notice

    def published(self, slot: int) -> Call | None:
        notice = self.notices[slot]
        return None if notice is None else notice.call

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        data = self.data[slot]
        assert data is not None
        return data[start:stop]


#: ``Notice.piece`` of memory that shows all at once.
_EVERYTHING = 1 << 62


class _World:
    """The lines of all ranks of one communicator; lives as long as one of them."""

    def __init__(self, size: int) -> None:
        self.lines = [ThreadLine(size) for _ in range(size)]


_worlds: weakref.WeakValueDictionary[str, _World] = weakref.WeakValueDictionary()


class ThreadPeers(Peers):
    """Peers in the same interpreter: everything is visible at once, in one piece."""

    def __init__(self, world: _World, membership: Membership, fault: FaultHook | None) -> None:
        super().__init__(world.lines, membership, fault)
        self._world = world
        self.line = world.lines[membership.rank]
        self.line.builder = self.line.caller = threading.current_thread()
        self.line.lanes = self.lanes

    def publish(self, slot: int, call: Call, source: Data, private: bool) -> None:
        """Show the tensor itself, or a copy of it."""
        if source is not None:
            flat = source.view(-1)
            self.line.data[slot] = flat.clone() if private else flat
        lent = source is not None and not private
        self.line.notices[slot] = Notice(call, call.agreement(), lent, _EVERYTHING)

    def withdraw(self, slot: int) -> None:
        """Drop the reference to the caller's tensor."""
        self.line.data[slot] = None

    def pause(self, ready: Callable[[], bool], seconds: float) -> None:
        """Hang up a bell, and sleep until it rings."""
        bell = threading.Lock()
        bell.acquire()
        bells = self.line.bells
        bells.append(bell)
        if not ready():
            bell.acquire(timeout=seconds)
        with contextlib.suppress(ValueError):
            bells.remove(bell)

    def wake(self, rank: int) -> None:
        """Ring all bells of ``rank``; each is taken down by the one who rings it."""
        bells = self._world.lines[rank].bells
        while bells:
            try:
                bell = bells.pop()
            except IndexError:
                return
            bell.release()

    def lost(self, rank: int) -> bool:
        """Whether the threads of ``rank`` have ended and nothing runs for it in the background."""
        line = self._world.lines[rank]
        if line.builder is None or line.caller is None or line.lanes is None:
            return False  # It has not come yet.
        return not (line.builder.is_alive() or line.caller.is_alive() or line.lanes.busy())


class ThreadsTransport(MemoryTransport):
    """Ranks are threads of this process.

    A rank lives as long as the thread that built its transport, and the one that made
    its latest call: when both have ended, ranks that wait for it get ``PeerLostError``.

    Args:
        membership: its store must be shared by threads of one process, for example a
            ``torch.distributed.HashStore``.

    Raises:
        CollectiveTimeoutError: some ranks did not come.
        TransportUnavailableError: some ranks are in another process.
    """

    name = "threads"

    def __init__(self, membership: Membership) -> None:
        peers = ThreadPeers(_attach(membership), membership, current_fault())
        super().__init__(membership, peers)
        self._line = peers.line

    def start(self, call: Call, source: Data, target: Data, timeout_s: float, asynchronous: bool) -> Handle:
        """See ``Transport.start``; notes that the calling thread is this rank."""
        self._line.caller = threading.current_thread()
        return super().start(call, source, target, timeout_s, asynchronous)


def _attach(membership: Membership) -> _World:
    """Meet the other ranks in this process, or refuse together with them."""
    world: _World | None = None
    key = ""
    if membership.rank == 0:
        world, key = _World(membership.size), uuid.uuid4().hex
        _worlds[key] = world
    key = _ask(membership, "threads/world", key)[0]
    world = world or _worlds.get(key)
    own = "" if world is not None else f"it is in process {os.getpid()}"
    raise_refusals(
        _ask(membership, "threads/refusal", own),
        membership.rank,
        membership.ranks,
        problem="threads needs all ranks in one process",
        advice="Use backend='gloo' for ranks that are processes.",
    )
    assert world is not None
    return world


def _ask(membership: Membership, topic: str, own: str) -> list[str]:
    return gather_values(membership.store, topic, membership.rank, membership.ranks, own, membership.timeout_s)
