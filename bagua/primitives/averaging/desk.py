"""Where the training thread and the background thread hand weights to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["Desk", "Parcel", "Stage", "is_finite"]


def is_finite(flat: torch.Tensor) -> bool:
    """Whether all elements are finite. Reads once and allocates nothing.

    Example:
        >>> is_finite(torch.tensor([1.0, -2.0])), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
    """
    return bool(torch.isfinite(torch.linalg.vector_norm(flat, ord=float("inf")))) if flat.numel() else True


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
    """

    snapshot: torch.Tensor
    average: torch.Tensor
    arrived: Callable[[], None] = _nothing

    @property
    def nbytes(self) -> int:
        """Bytes of one of the two."""
        return self.snapshot.numel() * self.snapshot.itemsize

    def make_difference(self) -> float:
        """Turn the mean in ``average`` into what it adds to ``snapshot``, and return the norm of that."""
        return float(torch.linalg.vector_norm(self.average.sub_(self.snapshot)))

    def measure_difference(self) -> float:
        """The norm of what the mean adds to ``snapshot``, which is spoiled."""
        return float(torch.linalg.vector_norm(self.snapshot.sub_(self.average)))


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
        self.wake = threading.Event()

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
        """Wake whoever waits for a change."""
        with self.changed:
            self.changed.notify_all()
