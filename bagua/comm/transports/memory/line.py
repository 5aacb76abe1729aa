"""What one rank of a shared-memory communicator tells the others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSequence
from itertools import accumulate
from typing import NamedTuple

import torch

from bagua.comm.call import Call


class RankKilled(BaseException):
    """Raised by a fault hook: the rank is gone, as if its process had been killed.

    Not an ``Exception``, so that nothing on the way mistakes it for a failure to handle.
    """


class Step(NamedTuple):
    """A place where a fault hook is called.

    Attributes:
        rank: the rank that has come here.
        label: the communicator, ``Membership.label``.
        call: call that the rank is making.
        name: ``publish``, ``arrive`` or ``pass`` (a barrier), ``offer``, ``settle``,
            ``want`` or ``take`` (a message).
        number: how many steps this rank has taken on this communicator, from 1.
    """

    rank: int
    label: str
    call: Call
    name: str
    number: int


#: Called at every step of every rank; may raise ``RankKilled``, sleep, or wait for another rank.
FaultHook = Callable[[Step], None]


class Deadline(NamedTuple):
    """When a call must be over: ``time.perf_counter()`` value, and the seconds it was given."""

    at: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        """So many seconds from now."""
        return cls(time.perf_counter() + timeout_s, timeout_s)

    @property
    def left_s(self) -> float:
        """Seconds until then; negative if it has passed."""
        return self.at - time.perf_counter()

    @property
    def limit_s(self) -> float:
        """``left_s`` for a call of torch, to which less than a millisecond means no limit."""
        return max(self.left_s, 0.001)


class LineState:
    """Values of a line's state word."""

    OPEN = 0
    #: Closed or dead. Matters to those who wait for this rank.
    LEFT = 1
    #: Failed or aborted. Matters to everyone.
    BROKEN = 2
    #: As BROKEN, because ranks disagreed on what they are doing.
    MISMATCHED = 3


class Words:
    """Places in ``Line.words``; tables of one word per rank start at the last three.

    A word is written by the owner of the line only, and only ever grows or leaves
    ``LineState.OPEN`` (``AWAITED`` apart).
    """

    #: Barriers that this rank has come to.
    ARRIVED = 0
    STATE = 1
    #: The global rank to blame, once the state is not OPEN.
    CULPRIT = 2
    #: What the calling thread itself waits for, while no collective of its rank is queued or running: 1 + a rank for
    #: the next message of that rank, 1 + size + a rank until that rank takes a message; 0 if it does not.
    AWAITED = 3

    def __init__(self, size: int) -> None:
        #: Pieces of messages offered to each rank.
        self.sent = 4
        #: Pieces this rank is ready to take from each rank.
        self.wanted = 4 + size
        #: Pieces taken from each rank.
        self.taken = 4 + 2 * size
        self.count = 4 + 3 * size


class Slots:
    """Places for notices: two alternate between collectives, and one for each message under way."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.count = 2 + 2 * size

    def outgoing(self, rank: int) -> int:
        """The message to ``rank``."""
        return 2 + rank

    def incoming(self, rank: int) -> int:
        """What is expected from ``rank``."""
        return 2 + self._size + rank


class Notice(NamedTuple):
    """One published call.

    Attributes:
        call: call of the rank.
        agreement: ``call.agreement()``, computed once.
        lent: True if the data lies in the caller's tensor, which the caller may change as
            soon as its call ends. If not, it stays as it is until the slot is used again.
        piece: how many elements of each row can be seen at once.
    """

    call: Call
    agreement: tuple[str, torch.dtype, int, str, int]
    lent: bool
    piece: int


class Line(ABC):
    """All that is visible of one rank. Its rank writes; the others only read."""

    words: MutableSequence[int] | memoryview[int]
    #: Why the state is no longer OPEN. Set before the state.
    reason: str

    @abstractmethod
    def notice(self, slot: int) -> Notice:
        """What was published last in ``slot``."""

    def latest(self) -> str:
        """The collective that was published last, for messages: it may be about to change."""
        calls = [call for call in map(self.published, (0, 1)) if call is not None]
        return str(max(calls, key=lambda call: call.sequence)) if calls else "no collective yet"

    @abstractmethod
    def published(self, slot: int) -> Call | None:
        """The call in ``slot``, without its data; None if there was none, or it is being written."""

    @abstractmethod
    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of the flat source published in ``slot``.

        The range lies inside one row, and inside the columns of one of the last two pieces.
        The owner may write to its own view where no other rank reads.
        """

    def address(self, slot: int, start: int, stop: int) -> int:
        """Where ``view(slot, start, stop)`` begins."""
        return self.view(slot, start, stop).data_ptr()

    def source(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """The same elements for the owner to read: it need not show to others what only it reads."""
        return self.view(slot, start, stop)

    def source_address(self, slot: int, start: int, stop: int) -> int:
        """Where ``source(slot, start, stop)`` begins."""
        return self.source(slot, start, stop).data_ptr()

    def conclude(self, slot: int) -> None:  # noqa: B027 - most lines keep nothing for it
        """What was published in ``slot`` has been read, and need not be kept for that any more."""


def rows(call: Call, size: int) -> list[tuple[int, int]]:
    """(first element, number of elements) of each row of the source of ``call``.

    A row is what goes to one rank; what every rank may see is one row.

    Example:
        >>> rows(Call("alltoall", torch.uint8, 5), 3)
        [(0, 5), (5, 5), (10, 5)]
        >>> rows(Call("allreduce", torch.uint8, 5), 3)
        [(0, 5)]
    """
    if call.kind == "alltoall_v":
        return list(zip(accumulate(call.send_counts, initial=0), call.send_counts, strict=False))
    if call.kind in ("scatter", "reduce_scatter", "alltoall"):
        return [(rank * call.numel, call.numel) for rank in range(size)]
    return [(0, call.numel)]
