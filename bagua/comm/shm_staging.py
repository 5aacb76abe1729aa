"""Room for data that does not lie in shared memory itself: bounded, and passed piece by piece."""

from __future__ import annotations

import torch

from bagua.comm.call import Call
from bagua.comm.copying import copy_flat
from bagua.comm.memory_exchange import slices
from bagua.comm.memory_line import rows
from bagua.comm.shm_line import Place, Where
from bagua.comm.shm_segments import HEADER_BYTES, Views, allocate

__all__ = ["Outbox", "Staging"]

_ALIGNED_ELEMENTS = 64
#: Where some ranks only write and others only read, they take turns: pieces small enough for both to be busy.
_IN_TURNS = frozenset({"broadcast", "reduce", "gather", "scatter"})
_TURN_BYTES = 512 * 1024


class _Area:
    """A segment that lives as long as this object."""

    def __init__(self, nbytes: int) -> None:
        self._memory, self.segment = allocate(nbytes, in_children=False)
        self.views = Views(self._memory)
        self.nbytes = nbytes
        self._source = torch.empty(0)

    def source(self, start: int, stop: int) -> torch.Tensor:
        """The data where it was copied from."""
        return self._source[start:stop]

    def forget(self) -> None:
        """Drop the reference to the caller's tensor."""
        self._source = torch.empty(0)


class Staging(_Area):
    """Two areas that take turns, for the collectives of one communicator.

    While peers read a piece in one area, the next goes into the other. What only this
    rank reads stays where it is: its own row, or of an allreduce its own slice.

    Args:
        area_bytes: of each area; the same on all ranks.
        rank: of this process.
        size: of the communicator.
    """

    def __init__(self, area_bytes: int, rank: int, size: int) -> None:
        super().__init__(2 * area_bytes)
        self._area_bytes = area_bytes
        self._rank = rank
        self._size = size
        self._latest = 0
        self._piece = 1
        self._call = Call("", 0, torch.uint8)
        self._rows: list[tuple[int, int]] = []

    def open(self, call: Call, source: torch.Tensor) -> Place:
        """Show the first piece of ``source``, which is flat, and say how to find the pieces."""
        self._call = call
        self._rows = rows(call, self._size)
        self._source = source
        room = min(self._area_bytes, _TURN_BYTES) if call.kind in _IN_TURNS else self._area_bytes
        piece = max(room // (len(self._rows) * source.element_size()), 1)
        self._piece = piece - piece % _ALIGNED_ELEMENTS if piece > _ALIGNED_ELEMENTS else piece
        self.show(0, self._piece)
        return Place(
            Where.STAGED, source.dtype, self.segment.number, HEADER_BYTES, self._piece, self._latest, self._area_bytes
        )

    def show(self, start: int, stop: int) -> None:
        """Show columns ``start`` to ``stop`` of each row in the area whose turn it is."""
        self._latest ^= 1
        if self._call.kind == "allreduce":
            stop = min(stop, self._source.numel())
            bounds = slices(start, stop, self._size)
            self._copy(0, 0, start, bounds[self._rank])
            self._copy(0, bounds[self._rank + 1] - start, bounds[self._rank + 1], stop)
            return
        for row, (first, length) in enumerate(self._rows):
            if len(self._rows) == 1 or row != self._rank:
                self._copy(row, 0, first + min(start, length), first + min(stop, length))

    def _copy(self, row: int, column: int, start: int, stop: int) -> None:
        """Copy elements ``start`` to ``stop`` to ``column`` of the part of ``row`` in the area."""
        if start < stop:
            source = self._source
            element = row * self._piece + column
            offset = HEADER_BYTES + self._latest * self._area_bytes + element * source.element_size()
            copy_flat(self.views.get(source.dtype, offset, stop - start), source[start:stop])


class Outbox(_Area):
    """One area for the messages to one rank; the next piece comes when the last was taken.

    Args:
        nbytes: of the area.
    """

    def open(self, source: torch.Tensor) -> Place:
        """Show the first piece of ``source``, which is flat, and say how to find the pieces."""
        self._source = source
        piece = max(self.nbytes // source.element_size(), 1)
        self.show(0, min(piece, source.numel()))
        return Place(Where.OUTBOX, source.dtype, self.segment.number, HEADER_BYTES, piece)

    def show(self, start: int, stop: int) -> None:
        """Show elements ``start`` to ``stop``."""
        copy_flat(self.views.get(self._source.dtype, HEADER_BYTES, stop - start), self._source[start:stop])
