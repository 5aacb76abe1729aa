"""Where the training thread and the background thread hand weights to each other."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from bagua.comm import Wake

__all__ = ["Desk", "Parcel", "Stage", "is_finite"]


#: Elements that are worked on at a time: so few that they stay in the cache from one operation to the next. The
#: background thread shares the memory with the training, which waits for it.
_CHUNK = 1 << 16


def _norm(flat: torch.Tensor) -> float:
    """Euclidean norm; inf or nan exactly if some element is, whatever their squares are."""
    if flat.numel() == 0:
        return 0.0
    norm = float(torch.linalg.vector_norm(flat))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(flat, ord=float("inf")))


def is_finite(flat: torch.Tensor) -> bool:
    """Whether all elements are finite. Reads once and allocates nothing.

    Example:
        >>> is_finite(torch.tensor([1.0, -2.0])), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
        >>> is_finite(torch.tensor([3e38, 3e38]))
        True
    """
    return math.isfinite(_norm(flat))


def _nothing() -> None:
    return


@dataclass
class Parcel:
    """Weights of one dtype on their way, in host memory.

    Attributes:
        snapshot: flat; written by the training thread, read by the background thread.
        average: flat, of the same layout; written by the background thread, read by the
            training thread.
        arrived: waits until ``snapshot`` is complete, where a device fills it.
        filled: whether ``average`` holds a copy of ``snapshot``, to be exchanged.
    """

    snapshot: torch.Tensor
    average: torch.Tensor
    arrived: Callable[[], None] = _nothing
    filled: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one of the two."""
        return self.snapshot.numel() * self.snapshot.itemsize

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.snapshot.split(_CHUNK), self.average.split(_CHUNK), strict=True)  # type: ignore[no-untyped-call]

    def fill(self) -> bool:
        """Copy ``snapshot`` into ``average``, and say whether it is finite."""
        finite = True
        for snapshot, average in self._chunks():
            average.copy_(snapshot)
            finite = finite and is_finite(average)
        self.filled = True
        return finite

    def make_difference(self, *, keep_mean: bool) -> float:
        """The norm of what the mean in ``average`` adds to ``snapshot``; inf or nan if the mean is not finite.

        Args:
            keep_mean: leave the mean in ``average``, and spoil ``snapshot``; otherwise ``average``
                becomes the difference.
        """
        total = 0.0
        for snapshot, average in self._chunks():
            norm = _norm(snapshot.sub_(average) if keep_mean else average.sub_(snapshot))
            total = math.hypot(total, norm)
        self.filled = False
        return total


class Stage(Enum):
    """Whose turn it is."""

    EMPTY = "empty"  #: The training thread's, which may put down a snapshot.
    SNAPSHOT = "snapshot"  #: The background thread's.
    AVERAGE = "average"  #: The training thread's, which takes what the round gave.


class Desk:
    """One place for a snapshot or an average. Only the thread whose turn it is touches the parcels.

    So there is no lock around weights: each stage is left by one thread only, and assigning
    it is what passes the parcels on.

    Args:
        parcels: what is handed over, in the same order and of the same sizes on all ranks.

    Attributes:
        stage: whose turn it is.
        at_rest: whether the snapshot was taken while its rank does not train.
        replace: whether the average takes the place of the weights, instead of being added.
        changed: notified when the background thread has changed something.
        wake: tells the background thread to look.
    """

    def __init__(self, parcels: Sequence[Parcel] = ()) -> None:
        self.parcels = list(parcels)
        self.stage = Stage.EMPTY
        self.at_rest = False
        self.replace = False
        self.changed = threading.Condition()
        self.wake = Wake()

    # The training thread.

    def hand_in(self, *, at_rest: bool) -> None:
        """The snapshots are complete."""
        assert self.stage is Stage.EMPTY
        self.at_rest = at_rest
        self.stage = Stage.SNAPSHOT
        self.wake.set()

    def clear(self) -> None:
        """The average was taken."""
        assert self.stage is Stage.AVERAGE
        self.stage = Stage.EMPTY
        self.wake.set()

    # The background thread.

    def deliver(self, *, replace: bool) -> None:
        """The averages are complete."""
        assert self.stage is Stage.SNAPSHOT
        self.replace = replace
        self.stage = Stage.AVERAGE
        self.tell()

    def discard(self) -> None:
        """The snapshot led to nothing, or is not wanted any more."""
        assert self.stage is Stage.SNAPSHOT
        self.stage = Stage.EMPTY
        self.tell()

    def tell(self) -> None:
        """Wake the thread that waits for a change."""
        with self.changed:
            self.changed.notify_all()
