"""What one rank tells the others, as bytes in its control memory."""

from __future__ import annotations

import bisect
import contextlib
import struct
from array import array
from collections.abc import Callable, Collection
from ctypes import memmove
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from bagua.comm.call import COLLECTIVES, DTYPE_NUMBERS, DTYPES, KIND_NUMBERS, Call, new_call
from bagua.comm.transports.memory.exchange import small_bytes
from bagua.comm.transports.memory.line import Line, Notice, Slots, Words
from bagua.comm.transports.shm.memory import GONE, SharedMemory, allocate, map_memory

#: Kinds of collectives that are all said in their agreement, the number of the call apart.
_WITHOUT_COUNTS = frozenset(KIND_NUMBERS[kind] for kind in COLLECTIVES if kind != "alltoall_v")
_BY_ROWS = ("scatter", "reduce_scatter", "alltoall")

#: Of all fields in their order, in a third of the time.
_new_notice = partial(tuple.__new__, Notice)

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


#: Views kept for the next call with the same sizes; more than a step of training asks for.
_KEPT_VIEWS = 64


class Views(dict[tuple[torch.dtype, int, int], torch.Tensor]):
    """Typed parts of one memory; the latest ones are kept, since a training step repeats them.

    A key is a dtype, the first byte, which is a multiple of the dtype's size, and the number of elements.

    Attributes:
        address: address of the first byte.
    """

    __slots__ = ("_bytes", "address")

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__()
        self.address = memory.address
        self._bytes = memory.bytes()

    def __missing__(self, key: tuple[torch.dtype, int, int]) -> torch.Tensor:
        dtype, offset, numel = key
        if len(self) >= _KEPT_VIEWS:
            self.clear()
        with torch.inference_mode(False):  # It would be a tensor that only that mode can write.
            view = self[key] = self._bytes[offset : offset + numel * dtype.itemsize].view(dtype)
        return view


class MappedSegment:
    """A segment of a peer.

    Args:
        descriptor: as the peer passed it on; it may be closed afterwards.

    Attributes:
        views: typed parts of all of it, header included.
    """

    __slots__ = ("_header", "views")

    def __init__(self, descriptor: int) -> None:
        memory = map_memory(descriptor)
        self.views = Views(memory)
        self._header = memory.view()[:8].cast("q")

    @property
    def gone(self) -> bool:
        """Whether the peer has no tensor in it any more."""
        return self._header[0] == GONE


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


class Location(NamedTuple):
    """Where the data of one published call lies.

    Attributes:
        where: a value of ``Where``.
        dtype: dtype of the stored elements; bytes for the reduction of a bool, for example.
        segment: number of the owner's segment; 0 where there is none.
        offset: bytes before the data in the segment, or before the first area.
        piece: elements of each row that can be seen at once.
        first: number of the area that holds the first piece.
        area_bytes: distance of the areas.
    """

    where: int
    dtype: torch.dtype = torch.uint8
    segment: int = 0
    offset: int = 0
    piece: int = EVERYTHING
    first: int = 0
    area_bytes: int = 0


NOWHERE = Location(Where.NOWHERE)


class _Reading(NamedTuple):
    """What the record of a peer said, and what that means, so that the same call is not read again.

    Attributes:
        numbers: the record, the number of the call apart.
        notice: meaning of the record.
        place: location of the data.
        agreed: the beginning of the record of this rank that it agreed with; empty if it did not.
    """

    numbers: array[int]
    notice: Notice
    place: Location
    agreed: tuple[int, ...]


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


class ControlLine(Line):
    """What the line of this rank and those of its peers have in common.

    Args:
        memory: the control memory of the rank.
        size: number of ranks of the communicator.

    Attributes:
        calls: call that was published last, by slot, as far as this rank has read it.
        places: location of its data.
        inline: typed parts of the control memory.
        inline_starts: place in it at which copied data begins, by slot; messages have none.
    """

    def __init__(self, memory: SharedMemory, size: int) -> None:
        self._layout = layout = ControlLayout(size)
        self._bytes = memory.view()
        end = layout.words + 8 * layout.word_count
        self.words = self._bytes[layout.words : end].cast("q")
        self.inline = Views(memory)
        self.inline_starts = [layout.inline + slot * layout.slot_bytes for slot in range(2)]
        slots = Slots(size).count
        self.calls: list[Call] = [Call("", torch.uint8)] * slots
        self.places = [NOWHERE] * slots
        #: Of the segments in which the data lies; they keep the memory, even if its owner has already left.
        self._shown: list[Views | None] = [None] * slots
        self._numbers = [
            self._bytes[self._record(slot) : self._record(slot) + _RECORD.size].cast("q") for slot in range(slots)
        ]
        #: What is the same in all lines when all ranks do the same with data in the same place.
        self.comparable = [numbers[:_SEQUENCE] for numbers in self._numbers]

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Elements of what was published in ``slot``, when ``notice`` has been called; see ``Line.view``."""
        place = self.places[slot]
        if place.where == Where.INLINE:
            return self.inline[place.dtype, self.inline_starts[slot] + start * place.dtype.itemsize, stop - start]
        if start == stop:
            return torch.empty(0, dtype=place.dtype, device="cpu")
        shown = self._shown[slot]
        assert shown is not None
        return shown[place.dtype, self._offset(slot, place, start), stop - start]

    def address(self, slot: int, start: int, stop: int) -> int:
        place = self.places[slot]
        if start == stop:
            return 0
        if place.where == Where.INLINE:
            return self.inline.address + self.inline_starts[slot] + start * place.dtype.itemsize
        shown = self._shown[slot]
        assert shown is not None
        return shown.address + self._offset(slot, place, start)

    def published(self, slot: int) -> Call | None:
        record = _RECORD.unpack_from(self._bytes, self._record(slot))
        if not record[_SEQUENCE]:
            return None
        with contextlib.suppress(IndexError, struct.error):
            return self._decode(slot, record)
        return None

    def _decode(self, slot: int, record: tuple[int, ...]) -> Call:
        kind, dtype, _, reduction, root, numel, source, sends, receives = record[:_PLACE]
        counts = struct.unpack_from(f"{sends + receives}q", self._bytes, self._record(slot) + _RECORD.size)
        numbers = kind, dtype, numel, reduction, root
        return Call.of_numbers(numbers, source, counts[:sends], counts[sends:], record[_SEQUENCE])

    def _offset(self, slot: int, place: Location, start: int) -> int:
        itemsize = place.dtype.itemsize
        if place.where == Where.WHOLE:
            return place.offset + start * itemsize
        if place.where == Where.OUTBOX:
            return place.offset
        call, row = self.calls[slot], 0
        if call.kind in _BY_ROWS:
            row, start = divmod(start, call.numel)
        elif call.kind == "alltoall_v":
            firsts = list(accumulate(call.send_counts, initial=0))
            row = bisect.bisect_right(firsts, start) - 1
            start -= firsts[row]
        number, column = divmod(start, place.piece)
        area = (place.first + number) & 1
        return place.offset + area * place.area_bytes + (row * place.piece + column) * itemsize

    def _record(self, slot: int) -> int:
        return self._layout.records + slot * self._layout.record_bytes


_NOTHING = torch.empty(0, device="cpu")


class Area:
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

    def show(self, start: int, stop: int, kept: tuple[int, int] | None = None) -> None:
        """Show elements ``start`` to ``stop``, but for what is ``kept`` where it is."""


class OwnLine(ControlLine):
    """The line of this rank: remembers as Python objects what it writes as bytes."""

    def __init__(self, memory: SharedMemory, size: int) -> None:
        super().__init__(memory, size)
        slots = Slots(size).count
        self._reason = ""
        self._inline_places: dict[torch.dtype, Location] = {}
        self.areas: list[Area | None] = [None] * slots
        self._lent: list[torch.Tensor | None] = [None] * slots
        self._agreements = [call.agreement() for call in self.calls]
        #: Each call that was published last, without its number.
        self._fields = [call[:-1] for call in self.calls]
        #: The beginning of each record, for peers' lines to compare with.
        self.agreements: list[tuple[int, ...]] = [()] * slots

    @property
    def reason(self) -> str:
        """Why the state is no longer OPEN."""
        return self._reason

    @reason.setter
    def reason(self, reason: str) -> None:
        self._reason = reason
        text = reason.encode(errors="backslashreplace")[:_REASON_BYTES]  # file names may hold what is no text
        start = self._layout.reason + 8
        self._bytes[start : start + len(text)] = text
        # A second writer writes the same. pack_into would clear the length first, and a reader would find no reason.
        self._bytes[start - 8 : start] = struct.pack("q", len(text))

    def write_copy(self, slot: int, call: Call, source: torch.Tensor) -> None:
        """Publish ``call`` with its data ``source``, which is copied into the control memory."""
        start = self.inline.address + self.inline_starts[slot]
        memmove(start, source.data_ptr(), source.nbytes)
        place = self._inline_places.get(source.dtype)
        if place is self.places[slot] and call[:-1] == self._fields[slot]:  # Nothing else has changed.
            self._numbers[slot][_SEQUENCE] = call[-1]
            self.calls[slot] = call
            return
        if place is None:
            place = self._inline_places[source.dtype] = Location(Where.INLINE, source.dtype)
        self.write(slot, call, place)

    def write(
        self, slot: int, call: Call, place: Location, lent: torch.Tensor | None = None, area: Area | None = None
    ) -> None:
        """Publish ``call``.

        Args:
            slot: number of the slot.
            call: call of this rank.
            place: location of its data.
            lent: the data, if it is the caller's.
            area: memory into which the data was copied, if not into the control memory.
        """
        fields, known = call[:-1], self.places[slot]
        if (place is known or place == known) and fields == self._fields[slot]:
            self._numbers[slot][_SEQUENCE] = call[-1]
        else:
            self._agreements[slot], self._fields[slot] = call.agreement(), fields
            self._write_all(slot, call, place)
        self.calls[slot], self.places[slot] = call, place
        self._lent[slot], self.areas[slot] = lent, area
        self._shown[slot] = None if area is None else area.views

    def _write_all(self, slot: int, call: Call, place: Location) -> None:
        numbers = call.numbers()
        sends, receives = call.send_counts, call.recv_counts
        _RECORD.pack_into(
            self._bytes, self._record(slot), *numbers, call.numel, call.source, len(sends), len(receives),
            place.where, DTYPE_NUMBERS[place.dtype], *place[2:], call.sequence,
        )  # fmt: skip
        if sends or receives:
            counts = sends + receives
            struct.pack_into(f"{len(counts)}q", self._bytes, self._record(slot) + _RECORD.size, *counts)
        self.agreements[slot] = numbers

    def withdraw(self, slot: int) -> None:
        """Drop the reference to the caller's tensor."""
        self._lent[slot], area = None, self.areas[slot]
        if area is not None:
            area.forget()

    def forget_areas(self) -> None:
        """Drop all references to memory other than the control memory."""
        self._lent = [None] * len(self._lent)
        self.areas = [None] * len(self.areas)
        self._shown = [None] * len(self._shown)

    def notice(self, slot: int) -> Notice:
        """What was published last in ``slot``."""
        place = self.places[slot]
        return _new_notice((self.calls[slot], self._agreements[slot], place.where == Where.WHOLE, place.piece))

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        lent = self._lent[slot]
        return super().view(slot, start, stop) if lent is None else lent[start:stop]

    def address(self, slot: int, start: int, stop: int) -> int:
        lent = self._lent[slot]
        if lent is None:
            return super().address(slot, start, stop)
        return lent.data_ptr() + start * lent.element_size()

    def source(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """See ``Line.source``: of what passes piece by piece, the own part was not copied."""
        area = self.areas[slot]
        return self.view(slot, start, stop) if area is None else area.source(start, stop)

    def source_address(self, slot: int, start: int, stop: int) -> int:
        area = self.areas[slot]
        return self.address(slot, start, stop) if area is None else area.source_address(start)


class PeerLine(ControlLine):
    """The line of a peer, which is only read.

    Args:
        memory: its control memory.
        size: number of ranks of the communicator.
        own: the line of this rank; peers that agree share its objects.
        segments: maps the segment with a given number.
    """

    def __init__(self, memory: SharedMemory, size: int, own: OwnLine, segments: Mapper) -> None:
        super().__init__(memory, size)
        self._own = own
        self._mapped = segments
        #: Number of the call in each slot whose data has been read.
        self._concluded = [0] * Slots(size).count
        #: What was read last in each slot; None also where counts follow the record.
        self._read: list[_Reading | None] = [None] * Slots(size).count

    @property
    def reason(self) -> str:  # type: ignore[override]  # only its owner writes it
        """Why the state is no longer OPEN."""
        (length,) = struct.unpack_from("q", self._bytes, self._layout.reason)
        start = self._layout.reason + 8
        return bytes(self._bytes[start : start + length]).decode(errors="replace")

    def adopt(self, slot: int) -> None:
        """Take it that this rank published in ``slot`` what the own one did, place included."""
        place = self._own.places[slot]
        if place.segment:
            self._shown[slot] = self._mapped(place.segment, self.named).views
        self.calls[slot], self.places[slot] = self._own.calls[slot], place

    def notice(self, slot: int) -> Notice:
        """What was published last in ``slot``."""
        if (known := self._read[slot]) is not None and self.comparable[slot] == known[0]:
            return self._notice_again(slot, known)
        record = _RECORD.unpack_from(self._bytes, self._record(slot))
        place = Location(record[_PLACE], DTYPES[record[_PLACE + 1]], *record[_PLACE + 2 : _SEQUENCE])
        if place.segment:  # Announced segments are fetched even if this rank needs nothing.
            self._shown[slot] = self._mapped(place.segment, self.named).views
        agreed = self._own.agreements[slot]
        if record[:_AGREEMENT] == agreed and record[0] in _WITHOUT_COUNTS:
            call, agreement = self._own.notice(slot)[:2]
        else:
            call, agreed = self._decode(slot, record), ()
            agreement = call.agreement()
        self.calls[slot], self.places[slot] = call, place
        notice = Notice(call, agreement, place.where == Where.WHOLE, place.piece)
        counted = call.send_counts or call.recv_counts
        self._read[slot] = None if counted else _Reading(array("q", record[:_SEQUENCE]), notice, place, agreed)
        return notice

    def _notice_again(self, slot: int, known: _Reading) -> Notice:
        """The call is like the one that is ``known``, but for its number."""
        _, before, place, agreed = known
        if place.segment:
            self._shown[slot] = self._mapped(place.segment, self.named).views
        if agreed and self._own.agreements[slot] is agreed:  # This rank made its own call once more, too.
            call = self._own.calls[slot]
        else:
            call = new_call((*before[0][:-1], self._numbers[slot][_SEQUENCE]))
        self.calls[slot], self.places[slot] = call, place
        return _new_notice((call, *before[1:]))

    def conclude(self, slot: int) -> None:
        """See ``Line.conclude``. The peer uses the slot again only when this rank has gone on."""
        self._concluded[slot] = self._numbers[slot][_SEQUENCE]
        self._shown[slot] = None

    def forget(self) -> None:
        """Nothing will be read any more."""
        self._shown = [None] * len(self._shown)

    def named(self) -> set[int]:
        """Numbers of the segments that the peer named and this rank has yet to read."""
        pairs = zip(self._numbers, self._concluded, strict=True)
        return {numbers[_SEGMENT] for numbers, concluded in pairs if numbers[_SEQUENCE] != concluded}
