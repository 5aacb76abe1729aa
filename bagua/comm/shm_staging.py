"""Room for data that does not lie in shared memory itself: bounded, and passed piece by piece."""

from __future__ import annotations

import torch

from bagua.comm.call import Call
from bagua.comm.memory_line import rows
from bagua.comm.shm_line import Place, Where
from bagua.comm.shm_segments import HEADER_BYTES, Views, allocate

__all__ = ["Outbox", "Staging"]

_ALIGNED_ELEMENTS = 64


class _Area:
    """A segment that lives as long as this object."""

    def __init__(self, nbytes: int) -> None:
        self._memory, self.segment = allocate(nbytes, in_children=False)
        self.views = Views(self._memory)
        self.nbytes = nbytes


class Staging(_Area):
    """Two areas that take turns, for the collectives of one communicator.

    While peers read a piece in one area, the next goes into the other.

    Args:
        area_bytes: of each area.
        size: of the communicator.
    """

    def __init__(self, area_bytes: int, size: int) -> None:
        super().__init__(2 * area_bytes)
        self._area_bytes = area_bytes
        self._size = size
        self._latest = 0
        self._piece = 1
        self._rows: list[tuple[int, int]] = []
        self._source = torch.empty(0)

    def open(self, call: Call, source: torch.Tensor) -> Place:
        """Show the first piece of ``source``, which is flat, and say how to find the pieces."""
        self._rows = rows(call, self._size)
        self._source = source
        piece = max(self._area_bytes // (len(self._rows) * source.element_size()), 1)
        self._piece = piece - piece % _ALIGNED_ELEMENTS if piece > _ALIGNED_ELEMENTS else piece
        self.show(0, self._piece)
        return Place(
            Where.STAGED, source.dtype, self.segment.number, HEADER_BYTES, self._piece, self._latest, self._area_bytes
        )

    def show(self, start: int, stop: int) -> None:
        """Show columns ``start`` to ``stop`` of each row in the area whose turn it is."""
        self._latest ^= 1
        source, itemsize = self._source, self._source.element_size()
        offset = HEADER_BYTES + self._latest * self._area_bytes
        for first, length in self._rows:
            part = source[first + min(start, length) : first + min(stop, length)]
            if part.numel():
                self.views.get(source.dtype, offset, part.numel()).copy_(part)
            offset += self._piece * itemsize

    def forget(self) -> None:
        """Drop the reference to the caller's tensor."""
        self._source = self._source[:0]


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
        self.views.get(self._source.dtype, HEADER_BYTES, stop - start).copy_(self._source[start:stop])

    def forget(self) -> None:
        """Drop the reference to the caller's tensor."""
        self._source = self._source[:0]
