"""The transport of processes that run on one Linux host: they read each other's memory."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import select
import sys
import threading
from collections.abc import Callable
from ctypes import memmove

import torch

from bagua import env
from bagua.comm.call import Call
from bagua.comm.lifetime.forks import family, forked_error
from bagua.comm.transports.contract import Handle, Membership, Transport
from bagua.comm.transports.memory.exchange import own_slice, reads_all, slice_length, small_bytes
from bagua.comm.transports.memory.line import FaultHook, Notice, rows
from bagua.comm.transports.memory.peers import Peers
from bagua.comm.transports.memory.transport import MemoryTransport
from bagua.comm.transports.shm.attach import DescriptorChannel, attach, explained
from bagua.comm.transports.shm.line import NOWHERE, Area, ControlLayout, Location, OwnLine, PeerLine, Where
from bagua.comm.transports.shm.memory import HEADER_BYTES, Segment, allocate, find
from bagua.comm.transports.threads import current_fault
from bagua.errors import TransportUnavailableError

#: Where some ranks only write and others only read, they take turns: pieces small enough for both to be busy.
_IN_TURNS = frozenset({"broadcast", "reduce", "gather", "scatter"})
_TURN_BYTES = 512 * 1024
#: Where each rank reads all that others show, a piece of this part of an area stays in the cache of a processor while
#: it is copied and reduced; with up to twice as much, one barrier less gains more.
_CACHED_PART = 8
#: Of both areas: every dtype can be seen there.
_ALIGNED_BYTES = 64


class Staging(Area):
    """Two areas that take turns, for the collectives of one communicator.

    While peers read a piece in one area, the next goes into the other. What only this
    rank reads stays where it is: its own row, or of an allreduce its own slice.

    Args:
        area_bytes: size of each area; the same on all ranks.
        rank: number of this process.
        size: number of ranks of the communicator.
    """

    def __init__(self, area_bytes: int, rank: int, size: int) -> None:
        self._area_bytes = area_bytes - area_bytes % _ALIGNED_BYTES
        super().__init__(2 * self._area_bytes)
        self._rank = rank
        self._size = size
        self._latest = 0
        self._call = Call("", torch.uint8)
        self._itemsize = 1
        self._rows: list[tuple[int, int]] = []
        self._piece = 1
        self._places = (NOWHERE, NOWHERE)

    def open(self, call: Call, source: torch.Tensor) -> Location:
        """Show the first piece of ``source``, which is flat, and say how to find the pieces."""
        if call[:-1] != self._call[:-1] or source.dtype is not self._places[0].dtype:
            self._divide(call, source.dtype)
        self._source = source
        stop, kept = self._piece, None
        if call.kind == "allreduce" and not reads_all(call, self._size):
            kept = own_slice(0, stop, slice_length(stop, self._size), self._rank)
        self.show(0, stop, kept)
        return self._places[self._latest]

    def _divide(self, call: Call, dtype: torch.dtype) -> None:
        """Choose pieces for ``call``, and those that follow if they are alike: the same on all ranks."""
        self._call, self._itemsize = call, dtype.itemsize
        self._rows = rows(call, self._size)
        piece = max(self._room(call) // (len(self._rows) * dtype.itemsize), 1)
        if call.kind != "alltoall_v":  # there the rows of other ranks have other lengths
            count = -(-call.numel // piece)
            piece = -(-call.numel // count)
        self._piece = piece
        place = Location(Where.STAGED, dtype, self.segment.number, HEADER_BYTES, piece, 0, self._area_bytes)
        self._places = (place, place._replace(first=1))

    def _room(self, call: Call) -> int:
        """Bytes to show at once."""
        if call.kind in _IN_TURNS:
            return min(self._area_bytes, _TURN_BYTES)
        cached = self._area_bytes // _CACHED_PART
        if call.kind == "allreduce" and reads_all(call, self._size) and call.nbytes > 2 * cached:
            return cached
        return self._area_bytes

    def show(self, start: int, stop: int, kept: tuple[int, int] | None = None) -> None:
        """Show columns ``start`` to ``stop`` of each row in the area whose turn it is.

        Args:
            start: first column.
            stop: the one behind the last.
            kept: bounds of what is left as it is, where there is one row.
        """
        self._latest ^= 1
        area = self.views.address + HEADER_BYTES + self._latest * self._area_bytes
        source, itemsize = self._source.data_ptr(), self._itemsize
        if kept is not None:
            first, last = kept
            memmove(area, source + start * itemsize, (first - start) * itemsize)
            memmove(area + (last - start) * itemsize, source + last * itemsize, (stop - last) * itemsize)
            return
        for row, (first, length) in enumerate(self._rows):
            if start < length and (row != self._rank or len(self._rows) == 1):
                part = area + row * self._piece * itemsize
                memmove(part, source + (first + start) * itemsize, (min(stop, length) - start) * itemsize)


class Outbox(Area):
    """One area for the messages to one rank; the next piece comes when the last was taken.

    Args:
        nbytes: size of the area.
    """

    def open(self, source: torch.Tensor) -> Location:
        """Show the first piece of ``source``, which is flat, and say how to find the pieces."""
        self._source = source
        piece = max(self.nbytes // source.element_size(), 1)
        self.show(0, min(piece, source.numel()))
        return Location(Where.OUTBOX, source.dtype, self.segment.number, HEADER_BYTES, piece)

    def show(self, start: int, stop: int, kept: tuple[int, int] | None = None) -> None:  # noqa: ARG002 - an outbox keeps nothing
        """Show elements ``start`` to ``stop``."""
        itemsize = self._source.element_size()
        target = self.views.address + HEADER_BYTES
        memmove(target, self._source.data_ptr() + start * itemsize, (stop - start) * itemsize)


_new_lock = threading.Lock  # One look-up less in each barrier.

#: Mappings of peers' memory that has gone are looked for once in so many calls, and while waiting.
_CALLS_PER_SWEEP = 1024
#: The first area of an outbox, and the largest one.
_OUTBOX_BYTES = (64 * 1024, 1024 * 1024)


class ShmPeers(Peers):
    """Peers that are processes of this host.

    Args:
        membership: the ranks.
        staging_bytes: size of each of the two areas for data in ordinary memory.
        fault: called at every step.
    """

    spin_s = 20e-6
    spin_inline_s = 300e-6

    def __init__(self, membership: Membership, staging_bytes: int, fault: FaultHook | None) -> None:
        layout = ControlLayout(membership.size)
        attached = attach(membership, layout.nbytes, {"staging area": staging_bytes})
        self._line = OwnLine(attached.memory, membership.size)
        self._channels = {
            rank: DescriptorChannel(peer.connection, membership.ranks[rank]) for rank, peer in attached.peers.items()
        }
        lines: list[OwnLine | PeerLine] = [
            self._line
            if rank == membership.rank
            else PeerLine(attached.peers[rank].memory, membership.size, self._line, self._channels[rank].segment)
            for rank in range(membership.size)
        ]
        super().__init__(lines, membership, fault)
        self._control_lines = lines
        self._peer_lines = [line for line in self.lines if isinstance(line, PeerLine)]
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._outboxes: dict[int, Outbox] = {}
        self._calls = 0
        self._sleepers_word = layout.sleepers
        self._bells = {rank: peer.bell for rank, peer in attached.peers.items()} | {membership.rank: attached.bell}
        self._processes = {peer.process: rank for rank, peer in attached.peers.items()}
        #: Their connections, too: these hang up when a process goes on with another program.
        self._ends = self._processes | {channel.connection: rank for rank, channel in self._channels.items()}
        self._lost: set[int] = set()
        self._watches: list[select.poll] = []
        self._asleep: set[int] = set()
        #: Held while the number of sleepers changes, and while a bell is rung or descriptors are closed. A signal
        #: handler that comes in between may ring, too.
        self._bed = threading.RLock()
        self._closed = False

    # Where the data lies.

    def publish(self, slot: int, call: Call, source: torch.Tensor | None, private: bool) -> None:
        """Show the data in the control memory, where it lies, or in an area of our own."""
        if slot < 2:
            self._calls += 1
            if self._calls % _CALLS_PER_SWEEP == 0:
                self._drop_gone()
        if private and source is not None:
            self._line.write_copy(slot, call, source)
        elif source is None or not source.nbytes:
            place = NOWHERE if source is None else Location(Where.NOWHERE, source.dtype)
            self._line.write(slot, call, place)
        else:
            self._publish_large(slot, call, source if source.dim() == 1 else source.view(-1))

    def _publish_large(self, slot: int, call: Call, source: torch.Tensor) -> None:
        segment = find(source)
        if segment is not None and self._offer(slot, segment):
            offset = source.data_ptr() - segment.address
            self._line.write(slot, call, Location(Where.WHOLE, source.dtype, segment.number, offset), lent=source)
            return
        if slot < 2 and self._staging is not None:  # Everyone was offered it when it was made.
            self._line.write(slot, call, self._staging.open(call, source), area=self._staging)
            return
        area = self._area(slot, source.numel() * source.element_size())
        if not self._offer(slot, area.segment):
            raise TransportUnavailableError("a descriptor of shared memory could not be passed")
        place = area.open(call, source) if isinstance(area, Staging) else area.open(source)
        self._line.write(slot, call, place, area=area)

    def _area(self, slot: int, nbytes: int) -> Staging | Outbox:
        try:
            if slot >= 2:
                return self._outbox(slot, nbytes)
            self._staging = Staging(self._staging_bytes, self.rank, self.size)
        except OSError as error:
            raise TransportUnavailableError(f"there is no shared memory to copy the data into: {error}") from error
        return self._staging

    def _offer(self, slot: int, segment: Segment) -> bool:
        """Make ``segment`` known to those who read ``slot``."""
        readers = self._others if slot < 2 else (slot - 2,)
        return all(self._channels[rank].offer(segment) for rank in readers)

    def _outbox(self, slot: int, nbytes: int) -> Outbox:
        small, large = _OUTBOX_BYTES
        wanted = small if nbytes <= small else large
        outbox = self._outboxes.get(slot)
        if outbox is None or outbox.nbytes < wanted:
            outbox = self._outboxes[slot] = Outbox(wanted)
        return outbox

    def notices(self, slot: int) -> list[Notice]:
        """What each rank published; quickly where all of them did the same with data in the same place."""
        own, expected = self._line.notice(slot), self._line.comparable[slot]
        for line in self._peer_lines:  # In each call: a generator takes twice as long.
            if line.comparable[slot] != expected or own.call.kind == "alltoall_v":
                return [own if line is self._line else line.notice(slot) for line in self._control_lines]
        for line in self._peer_lines:
            line.adopt(slot)
        return [own] * self.size

    def copies(self, slot: int, own: torch.Tensor) -> list[torch.Tensor] | None:
        """See ``Peers.copies``: straight from the control memory, where the lines that are alike have them."""
        mine, parts = self._line, [own] * self.size
        key = (mine.places[slot].dtype, mine.inline_starts[slot], mine.calls[slot].numel)
        expected = mine.comparable[slot]
        for other in self._others:
            line = self._control_lines[other]
            if line.comparable[slot] != expected:
                return None
            parts[other] = line.inline[key]
        return parts

    def stage(self, slot: int, start: int, stop: int, kept: tuple[int, int] | None = None) -> None:
        """Show the next piece, if the data is shown in pieces."""
        area = self._line.areas[slot]
        if area is not None:
            area.show(start, stop, kept)

    def conclude(self, slot: int) -> None:
        """Drop what was only needed for the call: peers' memory, and the caller's tensor if it was copied."""
        for line in self._peer_lines:
            line.conclude(slot)
        if self._line.areas[slot] is not None:
            self._line.withdraw(slot)

    def withdraw(self, slot: int) -> None:
        """Drop the reference to the caller's tensor."""
        self._line.withdraw(slot)

    def _drop_gone(self) -> None:
        for rank, channel in self._channels.items():
            line = self.lines[rank]
            assert isinstance(line, PeerLine)
            channel.drop_gone(line.named)

    # Waiting.

    def fence(self) -> None:
        """Taking a lock is an instruction that orders stores before later loads.

        x86-64 keeps all other orders: stores become visible in program order, and no load comes before an earlier load.
        A new one each time, which is quick: no thread waits, wherever another one was interrupted.
        """
        _new_lock().acquire()

    def give_way(self) -> None:
        """More ranks than processors, or two on one of them: the rank that is waited for can run."""
        os.sched_yield()

    def pause(self, ready: Callable[[], bool], seconds: float) -> None:
        """Sleep until the bell rings or a process ends."""
        try:
            self._go_to_bed()
            if ready():
                return
            watch = self._watch()
            for descriptor, _ in watch.poll(max(1, round(seconds * 1000))):
                rank = self._ends.get(descriptor)
                if rank is not None:
                    self._lost.add(rank)
            if not self._lost:
                self._watches.append(watch)
        finally:
            self._get_up()
        self._drop_gone()

    def _go_to_bed(self) -> None:
        """Say that one more thread sleeps. The first to come silences the bell."""
        with self._bed:
            self._asleep.add(threading.get_ident())
            self.own.words[self._sleepers_word] = sleepers = len(self._asleep)
            if sleepers == 1:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bells[self.rank])

    def _get_up(self) -> None:
        """Say that the calling thread does not sleep."""
        with self._bed:
            self._asleep.discard(threading.get_ident())
            self.own.words[self._sleepers_word] = len(self._asleep)

    def leave_with(self, error: BaseException, call: Call) -> None:
        """See ``Peers.leave_with``. An exception of a signal handler may have kept the thread from getting up."""
        self._get_up()
        super().leave_with(error, call)

    def _watch(self) -> select.poll:
        """What a sleeper looks at; used by one thread at a time."""
        with contextlib.suppress(IndexError):
            return self._watches.pop()
        watch = select.poll()
        watch.register(self._bells[self.rank], select.POLLIN)
        for descriptor, rank in self._ends.items():
            if rank not in self._lost:
                # A connection has something to read all the time; that it hangs up is told unasked.
                watch.register(descriptor, select.POLLIN if descriptor in self._processes else 0)
        return watch

    def wake(self, rank: int) -> None:
        """Ring the bell of ``rank`` if one of its threads sleeps."""
        self.fence()
        self._ring(rank)

    def wake_others(self) -> None:
        word = self._sleepers_word
        for rank in self._others:
            if self._words[rank][word]:
                self._ring(rank)

    def _ring(self, rank: int) -> None:
        if self._words[rank][self._sleepers_word]:
            with self._bed, contextlib.suppress(OSError):
                if not self._closed:
                    os.eventfd_write(self._bells[rank], 1)

    def lost(self, rank: int) -> bool:
        """Whether the process of ``rank`` was seen to have ended."""
        return rank in self._lost

    # The end.

    def release(self) -> None:
        """Close sockets and descriptors and give memory back; see ``Peers.release``."""
        with self._bed:
            if self._closed:
                return
            self._closed = True
            for descriptor in (*self._bells.values(), *self._processes):
                os.close(descriptor)
        for channel in self._channels.values():
            channel.close()
        self._line.forget_areas()
        for line in self._peer_lines:
            line.forget()
        self._staging = None
        self._outboxes.clear()

    def disown(self) -> None:
        """In a forked child: none of this memory is there, so have nothing that refers to it.

        The descriptors are closed: a connection hangs up when the last process that has it is gone.
        """
        if not self._closed:
            self._closed = True
            for descriptor in (*self._bells.values(), *self._processes):
                os.close(descriptor)
            for channel in self._channels.values():
                channel.disown()
        self.lines = ()
        self._words = self._peer_words = []


_log = logging.getLogger("bagua")


def shm_refusal() -> Exception | None:
    """Why this process cannot share memory with others, or None. Local, quick, no side effect."""
    reason = _obstacle()
    if not reason:
        return None
    return TransportUnavailableError(
        f"the shared-memory transport cannot run here: {reason}",
        advice="Leave the choice to backend=None, or use backend='gloo'.",
    )


def shm_unsupported() -> str:
    """Why processes of this kind of machine and interpreter cannot share memory; empty if they usually can."""
    if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "AMD64"):
        return f"it needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "it relies on the global interpreter lock, and this Python runs without"
    return ""


def _obstacle() -> str:
    if unsupported := shm_unsupported():
        return unsupported
    try:
        os.close(os.memfd_create("bagua", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.close(os.eventfd(0, os.EFD_CLOEXEC))
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return f"memfd, eventfd and pidfd are needed: {explained(error)}"
    return ""


class ShmTransport(MemoryTransport):
    """Ranks are processes of this host, all of the same user.

    Args:
        membership: the ranks.

    Raises:
        TransportUnavailableError: on all ranks, if one of them cannot.
        CollectiveTimeoutError: some ranks did not come.
    """

    name = "shm"
    #: Asynchronous calls have threads of their own; one more between these and the engine gains nothing.
    executor = "caller"

    def __init__(self, membership: Membership) -> None:
        peers = ShmPeers(membership, env.shm_staging_bytes(), current_fault())
        super().__init__(membership, peers)
        self._shm_peers = peers
        self._in_parent = True
        family.add(self)

    def abort(self, reason: str, culprit: int | None = None) -> None:
        """Mark the own line broken, and wake everyone."""
        if self._in_parent:
            super().abort(reason, culprit)

    def close(self) -> None:
        """Leave, and close what the kernel holds for us."""
        if self._in_parent:
            super().close()

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory that peers can map, for all that is too large to be copied on the way."""
        nbytes = numel * dtype.itemsize
        if self._in_parent and device.type == "cpu" and nbytes > small_bytes(self.size):
            try:
                memory, _ = allocate(nbytes, in_children=True)
                return memory.tensor(dtype, numel, HEADER_BYTES)
            except OSError as error:
                _log.info("rank %d: ordinary memory instead of shared memory: %s", self.rank, error)
        return Transport.empty(self, numel, dtype, device)

    def disown(self) -> None:
        """In a forked child: do nothing any more, least of all to the parent's peers."""
        self._in_parent = False
        self._shm_peers.disown()
        # Instead of a question in each call of all the others.
        self.start = self._refuse  # type: ignore[assignment, method-assign]

    def _refuse(self, *_: object) -> Handle:
        raise forked_error()
