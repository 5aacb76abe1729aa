"""Tensors in shared memory: to which segment an address belongs, and when a segment is gone.

A segment is memory of this process that peers map, for reading, when a notice first names
it. It is found by the address of a tensor, so every communicator recognises it. It lives
as long as the tensors in it; then its first word tells the peers to drop their mapping.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import os
import threading
from operator import attrgetter

import torch

from bagua.comm.lifetime.forks import family
from bagua.comm.transports.shm.memory import SharedMemory, create_memory, make_private

#: Data starts here; before it lies the word that says whether the segment is still in use.
HEADER_BYTES = 64
#: What that word says when the last tensor has died; it begins as 0.
GONE = 1


class Segment:
    """Memory of this process that peers may map.

    Attributes:
        number: names the segment in notices; never used again in this process.
        descriptor: file descriptor of the memory, to pass on; open as long as the segment lives.
        address: address of the first byte.
        end: address behind the last byte.
        gone: True once its last tensor has died.
    """

    __slots__ = ("__weakref__", "_in_children", "_process", "address", "descriptor", "end", "gone", "number")

    def __init__(self, number: int, memory: SharedMemory, descriptor: int, in_children: bool) -> None:
        self.number = number
        self.descriptor = descriptor
        # Not the memory: it must be able to end while the registry has the segment.
        self.address = memory.address
        self.end = memory.address + memory.nbytes
        self.gone = False
        self._process = os.getpid()
        self._in_children = in_children
        memory.before_its_end(self._leave)

    def _leave(self) -> None:
        """Tell the peers. Runs wherever the last tensor dies, so it takes no lock."""
        self.gone = True
        if self._process == os.getpid():
            ctypes.c_int64.from_address(self.address).value = GONE
            os.close(self.descriptor)

    def inherit(self) -> None:
        """In a forked child: have the memory for itself, if it is there at all, and close the descriptor.

        Now, since later it may be the number of a file of the child.
        """
        if self.gone:
            return
        if self._in_children:
            make_private(self.address, self.end - self.address, self.descriptor)
        os.close(self.descriptor)


_address = attrgetter("address")


class _Registry:
    """The segments of this process, by address."""

    def __init__(self) -> None:
        #: A signal handler may interrupt ``add``, and call it.
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        #: First addresses and segments in their order; replaced as a whole.
        self._table: tuple[list[int], list[Segment]] = ([], [])
        # Before the transports, which drop tensors: the descriptor of a segment that is gone stays open.
        family.add(self, first=True)

    def disown(self) -> None:
        """In a forked child: have the memory for itself, and know of no segment."""
        for segment in self._table[1]:
            segment.inherit()
        self._lock = threading.RLock()
        self._table = ([], [])

    def add(self, memory: SharedMemory, descriptor: int, in_children: bool) -> Segment:
        segment = Segment(next(self._numbers), memory, descriptor, in_children)
        with self._lock:
            while not segment.gone:
                before = self._table
                living = sorted([*(other for other in before[1] if not other.gone), segment], key=_address)
                after = ([other.address for other in living], living)
                if self._table is before:  # No signal handler has added another one.
                    self._table = after
                    break
        return segment

    def find(self, address: int, nbytes: int) -> Segment | None:
        addresses, segments = self._table
        place = bisect.bisect_right(addresses, address) - 1
        if place < 0:
            return None
        segment = segments[place]
        return segment if address + nbytes <= segment.end and not segment.gone else None


_registry = _Registry()


def allocate(nbytes: int, *, in_children: bool) -> tuple[SharedMemory, Segment]:
    """A new segment with room for ``nbytes`` behind its header.

    Args:
        nbytes: number of bytes of data.
        in_children: True if forked children have it, too: as memory of their own, from their first write to it.

    Raises:
        OSError: there is not so much memory, or there are too many open files.
    """
    memory, descriptor = create_memory(HEADER_BYTES + nbytes, in_children=in_children)
    return memory, _registry.add(memory, descriptor, in_children)


def find(tensor: torch.Tensor) -> Segment | None:
    """The segment in which all of ``tensor``, which is contiguous, lies; None for ordinary memory."""
    return _registry.find(tensor.data_ptr(), tensor.numel() * tensor.element_size())
