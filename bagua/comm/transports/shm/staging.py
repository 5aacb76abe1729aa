"""Room for data that does not lie in shared memory itself: bounded, and passed piece by piece."""

from __future__ import annotations

from ctypes import memmove

import torch

from bagua.comm.call import Call
from bagua.comm.transports.memory.exchange import own_slice, reads_all, slice_length
from bagua.comm.transports.memory.line import rows
from bagua.comm.transports.shm.line import NOWHERE, Location, Where
from bagua.comm.transports.shm.segments import HEADER_BYTES, Views, allocate

#: Where some ranks only write and others only read, they take turns: pieces small enough for both to be busy.
_IN_TURNS = frozenset({"broadcast", "reduce", "gather", "scatter"})
_TURN_BYTES = 512 * 1024
#: Where each rank reads all that others show, a piece of this part of an area stays in the cache of a processor while
#: it is copied and reduced; with up to twice as much, one barrier less gains more.
_CACHED_PART = 8
#: Of both areas: every dtype can be seen there.
_ALIGNED_BYTES = 64

_NOTHING = torch.empty(0)


class _Area:
    """A segment that lives as long as this object.

    Attributes:
        segment: the memory.
        views: typed parts of the memory.
        nbytes: its size.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory, self.segment = allocate(nbytes, in_children=False)
        self.views = Views(self._memory)
        self.nbytes = nbytes
        self._source = _NOTHING

    def source(self, start: int, stop: int) -> torch.Tensor:
        """The data where it was copied from."""
        source = self._source
        return source if stop - start == source.numel() else source[start:stop]

    def source_address(self, start: int) -> int:
        """Where element ``start`` of that data lies; cheaper than to make a tensor of the part."""
        return self._source.data_ptr() + start * self._source.element_size()

    def forget(self) -> None:
        """Drop the reference to the caller's tensor."""
        self._source = _NOTHING


class Staging(_Area):
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
        self._call = Call("", 0, torch.uint8)
        self._itemsize = 1
        self._rows: list[tuple[int, int]] = []
        self._piece = 1
        self._places = (NOWHERE, NOWHERE)

    def open(self, call: Call, source: torch.Tensor) -> Location:
        """Show the first piece of ``source``, which is flat, and say how to find the pieces."""
        if call[2:] != self._call[2:] or call.kind != self._call.kind or source.dtype is not self._places[0].dtype:
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


class Outbox(_Area):
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

    def show(self, start: int, stop: int) -> None:
        """Show elements ``start`` to ``stop``."""
        itemsize = self._source.element_size()
        target = self.views.address + HEADER_BYTES
        memmove(target, self._source.data_ptr() + start * itemsize, (stop - start) * itemsize)
