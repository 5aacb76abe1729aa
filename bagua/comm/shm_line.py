"""What one rank tells the others, as bytes in its control memory."""

from __future__ import annotations

import bisect
import struct
from abc import abstractmethod
from collections.abc import Callable, Collection
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch

from bagua.comm.call import COLLECTIVES, POINT_TO_POINT, Call
from bagua.comm.memory_exchange import small_bytes
from bagua.comm.memory_line import Line, Notice, Slots, Words
from bagua.comm.shm_memory import SharedMemory
from bagua.comm.shm_segments import MappedSegment, Views

__all__ = [
    "NONCE_BYTES",
    "NOWHERE",
    "Area",
    "ControlLayout",
    "ControlLine",
    "OwnLine",
    "PeerLine",
    "Place",
    "Where",
    "Window",
]

_KINDS = COLLECTIVES + POINT_TO_POINT
_KIND_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_REDUCTIONS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_REDUCTION_NUMBERS = {name: number for number, name in enumerate(_REDUCTIONS)}
#: Equal on all ranks, as long as they run the same torch; attaching compares torch's version.
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES)}
#: Kinds of collectives that are all said in their agreement, the number of the call apart.
_WITHOUT_COUNTS = frozenset(_KIND_NUMBERS[kind] for kind in COLLECTIVES if kind != "alltoall_v")
_BY_ROWS = ("scatter", "reduce_scatter", "alltoall")

#: ``Notice.piece`` of data that is visible all at once.
EVERYTHING = 1 << 62

_CACHE_LINE_BYTES = 64
_PAGE_BYTES = 4096
_REASON_BYTES = 1024
#: At the beginning of the control memory.
NONCE_BYTES = 16

#: Kind, dtype, number of elements, reduction and root come first, so that one comparison
#: shows whether ranks agree; then the rest of the call, then the place. The number of the
#: call is the last, because it alone changes when the same call is made again.
_RECORD = struct.Struct("17q")
_AGREEMENT, _PLACE, _SEGMENT, _SEQUENCE = 5, 9, 11, 16


#: Maps the segment with a number, and unmaps others that are gone, but for those that a function names.
Mapper = Callable[[int, Callable[[], Collection[int]]], MappedSegment]


class Where:
    """Where published data lies."""

    NOWHERE = 0
    #: In the control memory, copied.
    INLINE = 1
    #: In a segment, as the caller has it.
    WHOLE = 2
    #: In a segment, copied, piece by piece into areas that alternate.
    STAGED = 3
    #: In a segment, copied, piece by piece into one area.
    OUTBOX = 4


class Place(NamedTuple):
    """Where the data of one published call lies.

    Attributes:
        where: a value of ``Where``.
        dtype: of the stored elements; bytes for the reduction of a bool, for example.
        segment: number of the owner's segment; 0 where there is none.
        offset: of the data in the segment, or of the first area; in bytes.
        piece: elements of each row that can be seen at once.
        first: which area holds the first piece.
        area_bytes: distance of the areas.
    """

    where: int
    dtype: torch.dtype = torch.uint8
    segment: int = 0
    offset: int = 0
    piece: int = EVERYTHING
    first: int = 0
    area_bytes: int = 0


NOWHERE = Place(Where.NOWHERE)


class ControlLayout:
    """Where things lie in the control memory of each rank of a communicator of ``size`` ranks."""

    def __init__(self, size: int) -> None:
        self.words = _CACHE_LINE_BYTES
        #: One word more than in other memory: how many threads of the rank sleep.
        self.sleepers = Words(size).count
        self.word_count = self.sleepers + 1
        self.reason = _up(self.words + 8 * self.word_count, _CACHE_LINE_BYTES)
        self.records = _up(self.reason + 8 + _REASON_BYTES, _CACHE_LINE_BYTES)
        self.record_bytes = _up(_RECORD.size + 8 * (2 * size + 1), _CACHE_LINE_BYTES)
        self.inline = _up(self.records + self.record_bytes * Slots(size).count, _PAGE_BYTES)
        self.slot_bytes = small_bytes(size)
        self.nbytes = self.inline + 2 * self.slot_bytes


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Window:
    """Which columns the ranks look at in each of the two slots for collectives; private to a rank."""

    __slots__ = ("base", "index")

    def __init__(self) -> None:
        #: First column of the current piece, and how many pieces came before it.
        self.base = [0, 0]
        self.index = [0, 0]

    def open(self, slot: int) -> None:
        """Look at the first piece."""
        self.base[slot] = self.index[slot] = 0

    def move(self, slot: int, start: int) -> None:
        """Look at the next piece, which begins with column ``start``."""
        self.base[slot] = start
        self.index[slot] += 1


class ControlLine(Line):
    """What the line of this rank and those of its peers have in common.

    Args:
        memory: the control memory of the rank.
        size: of the communicator.
        window: of this rank.
    """

    def __init__(self, memory: SharedMemory, size: int, window: Window) -> None:
        self._layout = layout = ControlLayout(size)
        self._window = window
        self._bytes = memory.view()
        end = layout.words + 8 * layout.word_count
        self.words = self._bytes[layout.words : end].cast("q")
        self._inline = Views(memory)
        slots = Slots(size).count
        self._calls: list[Call] = [Call("", 0, torch.uint8)] * slots
        self._places = [NOWHERE] * slots
        self._numbers = [
            self._bytes[self._record(slot) : self._record(slot) + _RECORD.size].cast("q") for slot in range(slots)
        ]
        #: What is the same in all lines when all ranks do the same with data in the same place.
        self.comparable = [numbers[:_SEQUENCE] for numbers in self._numbers]

    @property
    def nonce(self) -> bytes:
        """What the owner wrote there, to show that this is its memory."""
        return bytes(self._bytes[:NONCE_BYTES])

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Elements of what was published in ``slot``, when ``notice`` has been called; see ``Line.view``."""
        place = self._places[slot]
        if place.where == Where.INLINE:
            return self._inline_view(slot, place.dtype, start, stop)
        if start == stop:
            return torch.empty(0, dtype=place.dtype)
        return self._views(slot).get(place.dtype, self._offset(slot, place, start), stop - start)

    @abstractmethod
    def _views(self, slot: int) -> Views:
        """The segment in which the data published in ``slot`` lies."""

    def _offset(self, slot: int, place: Place, start: int) -> int:
        itemsize = place.dtype.itemsize
        if place.where == Where.WHOLE:
            return place.offset + start * itemsize
        if place.where == Where.OUTBOX:
            return place.offset
        row, column = _row_and_column(self._calls[slot], start)
        area = (place.first + self._window.index[slot]) & 1
        element = row * place.piece + column - self._window.base[slot]
        return place.offset + area * place.area_bytes + element * itemsize

    def _record(self, slot: int) -> int:
        return self._layout.records + slot * self._layout.record_bytes

    def _inline_view(self, slot: int, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        offset = self._layout.inline + slot * self._layout.slot_bytes + start * dtype.itemsize
        return self._inline.get(dtype, offset, stop - start)


def _row_and_column(call: Call, start: int) -> tuple[int, int]:
    """Where element ``start`` of the source of ``call`` is; see ``memory_line.rows``."""
    if call.kind in _BY_ROWS:
        return divmod(start, call.numel)
    if call.kind != "alltoall_v":
        return 0, start
    firsts = list(accumulate(call.send_counts, initial=0))
    row = bisect.bisect_right(firsts, start) - 1
    return row, start - firsts[row]


class Area(Protocol):
    """Where data was copied for others to see."""

    views: Views

    def source(self, start: int, stop: int) -> torch.Tensor:
        """The data where it was copied from."""


class OwnLine(ControlLine):
    """The line of this rank: remembers as Python objects what it writes as bytes."""

    def __init__(self, memory: SharedMemory, size: int, window: Window) -> None:
        super().__init__(memory, size, window)
        slots = Slots(size).count
        self._reason = ""
        self._inline_places: dict[torch.dtype, Place] = {}
        self._notices: list[Notice | None] = [None] * slots
        self._areas: list[Area | None] = [None] * slots
        self._lent: list[torch.Tensor | None] = [None] * slots
        #: The beginning of each record, for peers' lines to compare with.
        self.agreements: list[tuple[int, ...]] = [()] * slots

    def write_nonce(self, nonce: bytes) -> None:
        """Show that this memory belongs to the rank that announced ``nonce``."""
        self._bytes[:NONCE_BYTES] = nonce

    @property
    def reason(self) -> str:
        """Why the state is no longer OPEN."""
        return self._reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self._reason = reason
        text = reason.encode()[:_REASON_BYTES]
        start = self._layout.reason + 8
        self._bytes[start : start + len(text)] = text
        struct.pack_into("q", self._bytes, self._layout.reason, len(text))

    def inline(self, slot: int, source: torch.Tensor) -> Place:
        """Copy ``source`` into the control memory."""
        self._inline_view(slot, source.dtype, 0, source.numel()).copy_(source)
        place = self._inline_places.get(source.dtype)
        if place is None:
            place = self._inline_places[source.dtype] = Place(Where.INLINE, source.dtype)
        return place

    def write(
        self, slot: int, call: Call, place: Place, lent: torch.Tensor | None = None, area: Area | None = None
    ) -> None:
        """Publish ``call``.

        Args:
            slot: where.
            call: what this rank does.
            place: of its data.
            lent: the data, if it is the caller's.
            area: where the data was copied, if not into the control memory.
        """
        before = self._calls[slot]
        if call.kind == before.kind and call[2:] == before[2:] and place == self._places[slot]:
            self._numbers[slot][_SEQUENCE] = call.sequence
            agreement = self.notice(slot).agreement
        else:
            agreement = call.agreement()
            self._write_all(slot, call, place)
        self._notices[slot] = Notice(call, agreement, place.where == Where.WHOLE, place.piece)
        self._calls[slot], self._places[slot] = call, place
        self._lent[slot], self._areas[slot] = lent, area

    def _write_all(self, slot: int, call: Call, place: Place) -> None:
        numbers = (
            _KIND_NUMBERS[call.kind], _DTYPE_NUMBERS[call.dtype], call.agreement()[2],
            _REDUCTION_NUMBERS[call.reduction], call.root,
        )  # fmt: skip
        sends, receives = call.send_counts, call.recv_counts
        _RECORD.pack_into(
            self._bytes, self._record(slot), *numbers, call.numel, call.source, len(sends), len(receives),
            place.where, _DTYPE_NUMBERS[place.dtype], *place[2:], call.sequence,
        )  # fmt: skip
        if sends or receives:
            counts = sends + receives
            struct.pack_into(f"{len(counts)}q", self._bytes, self._record(slot) + _RECORD.size, *counts)
        self.agreements[slot] = numbers

    def place(self, slot: int) -> Place:
        """Where the data published last in ``slot`` lies."""
        return self._places[slot]

    def withdraw(self, slot: int) -> None:
        """Forget the caller's tensor."""
        self._lent[slot] = None

    def forget_areas(self) -> None:
        """Drop all references to memory other than the control memory."""
        self._lent = [None] * len(self._lent)
        self._areas = [None] * len(self._areas)

    def notice(self, slot: int) -> Notice:
        """What was published last in ``slot``."""
        notice = self._notices[slot]
        assert notice is not None
        return notice

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """See ``Line.view``."""
        lent = self._lent[slot]
        return super().view(slot, start, stop) if lent is None else lent[start:stop]

    def source(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """See ``Line.source``: of what passes piece by piece, the own part was not copied."""
        area = self._areas[slot]
        return self.view(slot, start, stop) if area is None else area.source(start, stop)

    def _views(self, slot: int) -> Views:
        area = self._areas[slot]
        assert area is not None
        return area.views


class PeerLine(ControlLine):
    """The line of a peer, which is only read.

    Args:
        memory: its control memory.
        size: of the communicator.
        window: of this rank.
        own: the line of this rank; peers that agree share its objects.
        segments: maps the segment with a given number.
    """

    def __init__(self, memory: SharedMemory, size: int, window: Window, own: OwnLine, segments: Mapper) -> None:
        super().__init__(memory, size, window)
        self._own = own
        self._mapped = segments
        #: Where the data of each slot lies: kept while it is read, even if its owner has already left.
        self._read: list[MappedSegment | None] = [None] * Slots(size).count
        #: Number of the call in each slot whose data has been read.
        self._concluded = [0] * Slots(size).count

    @property
    def reason(self) -> str:
        """Why the state is no longer OPEN."""
        (length,) = struct.unpack_from("q", self._bytes, self._layout.reason)
        start = self._layout.reason + 8
        return bytes(self._bytes[start : start + length]).decode(errors="replace")

    def adopt(self, slot: int) -> None:
        """Take it that this rank published in ``slot`` what the own one did, place included."""
        place = self._own.place(slot)
        if place.segment:
            self._read[slot] = self._mapped(place.segment, self.named)
        self._calls[slot], self._places[slot] = self._own.notice(slot).call, place

    def notice(self, slot: int) -> Notice:
        """What was published last in ``slot``."""
        record = _RECORD.unpack_from(self._bytes, self._record(slot))
        place = Place(record[_PLACE], _DTYPES[record[_PLACE + 1]], *record[_PLACE + 2 : _SEQUENCE])
        if place.segment:  # Announced segments are fetched even if this rank needs nothing.
            self._read[slot] = self._mapped(place.segment, self.named)
        if record[:_AGREEMENT] == self._own.agreements[slot] and record[0] in _WITHOUT_COUNTS:
            call, agreement = self._own.notice(slot)[:2]
        else:
            call = self._decode(slot, record)
            agreement = call.agreement()
        self._calls[slot], self._places[slot] = call, place
        return Notice(call, agreement, place.where == Where.WHOLE, place.piece)

    def conclude(self, slot: int) -> None:
        """See ``Line.conclude``. The peer uses the slot again only when this rank has gone on."""
        self._concluded[slot] = self._numbers[slot][_SEQUENCE]
        self._read[slot] = None

    def forget(self) -> None:
        """Nothing will be read any more."""
        self._read = [None] * len(self._read)

    def named(self) -> set[int]:
        """Numbers of the segments that the peer named and this rank has yet to read."""
        pairs = zip(self._numbers, self._concluded, strict=True)
        return {numbers[_SEGMENT] for numbers, concluded in pairs if numbers[_SEQUENCE] != concluded}

    def _decode(self, slot: int, record: tuple[int, ...]) -> Call:
        kind, dtype, _, reduction, root, numel, source, sends, receives = record[:_PLACE]
        counts = struct.unpack_from(f"{sends + receives}q", self._bytes, self._record(slot) + _RECORD.size)
        return Call(
            _KINDS[kind], record[_SEQUENCE], _DTYPES[dtype], numel, _REDUCTIONS[reduction], root, source,
            counts[:sends], counts[sends:],
        )  # fmt: skip

    def _views(self, slot: int) -> Views:
        segment = self._read[slot]
        assert segment is not None
        return segment.views
