"""Where the training thread and the background thread hand weights to each other, and how they leave the model."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch

from bagua.buckets import Bucket, form_buckets
from bagua.comm import Communicator, Wake, copy_flat
from bagua.errors import ConfigurationError

#: Returns the buffers of a module as they are now, by name.
Buffers = Callable[[], Mapping[str, torch.Tensor]]
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
class Contribution:
    """Weights of one dtype on their way, in host memory.

    Attributes:
        snapshot: flat; written by the training thread, read by the background thread.
        average: flat, of the same layout; written by the background thread, read by the
            training thread.
        arrived: waits until ``snapshot`` is complete, where a device fills it.
        filled: True while ``average`` holds a copy of ``snapshot``, to be exchanged.
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


class HandoffBuffer:
    """One place for a snapshot or an average. Only the thread whose turn it is touches the contributions.

    So there is no lock around weights: each stage is left by one thread only, and assigning
    it is what passes the contributions on.

    Args:
        contributions: weights to hand over, in the same order and of the same sizes on all ranks.

    Attributes:
        stage: the thread whose turn it is.
        at_rest: True if the snapshot was taken while its rank does not train.
        replace: True if the average takes the place of the weights, instead of being added.
        changed: notified when the background thread has changed something.
        wake: tells the background thread to look.
    """

    def __init__(self, contributions: Sequence[Contribution] = ()) -> None:
        self.contributions = list(contributions)
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


class Part:
    """The tensors of one bucket, and the contribution in which they travel. For the training thread only.

    Args:
        bucket: the layout; its parameters are what is averaged.
        fetch: returns the tensors to use in place of the bucket's own, in the same order, for
            tensors that a module may replace.
    """

    def __init__(self, bucket: Bucket, fetch: Callable[[], Sequence[torch.Tensor]] | None = None) -> None:
        self._bucket = bucket
        self._fetch = fetch
        self._on_host = bucket.device.type == "cpu"
        self.contribution = Contribution(self._memory(), self._memory())
        self._snapshot_views = bucket.views(self.contribution.snapshot)
        self._average_views = bucket.views(self.contribution.average)

    def _memory(self) -> torch.Tensor:
        bucket = self._bucket
        if self._on_host:
            return bucket.empty()
        return torch.zeros(bucket.numel, dtype=bucket.dtype, pin_memory=bucket.device.type == "cuda")

    def _flat(self) -> torch.Tensor | None:
        """The flat memory of the weights, if that is where they still are."""
        weights = self._bucket.weights
        if self._fetch is None and weights is not None and self._bucket.parameters[0].data_ptr() == weights.data_ptr():
            return weights
        return None

    def _tensors(self) -> list[torch.Tensor]:
        if self._fetch is None:
            return list(self._bucket.parameters)
        tensors = list(self._fetch())
        for name, before, now in zip(self._bucket.names, self._bucket.parameters, tensors, strict=True):
            if (now.shape, now.dtype, now.device) != (before.shape, before.dtype, before.device):
                raise ConfigurationError(
                    f"buffer {name} is another one than when the model was wrapped",
                    argument="module",
                    expected=f"shape {list(before.shape)}, {before.dtype} on {before.device}",
                    seen=f"shape {list(now.shape)}, {now.dtype} on {now.device}",
                )
        return tensors

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """Copy the tensors into ``contribution.snapshot``; from a device, without waiting for it."""
        flat = self._flat()
        if flat is not None and self._on_host:
            copy_flat(self.contribution.snapshot, flat)
        elif flat is not None:
            self.contribution.snapshot.copy_(flat, non_blocking=True)
        else:
            torch._foreach_copy_(self._snapshot_views, self._tensors(), non_blocking=not self._on_host)
        if self._bucket.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._bucket.device))
            self.contribution.arrived = event.synchronize

    @torch.no_grad()
    def take_average(self, *, replace: bool) -> None:
        """Add ``contribution.average`` to the tensors, or put it in their place."""
        flat = self._flat()
        if flat is not None:
            arrived = self.contribution.average.to(flat.device, non_blocking=True)
            flat.copy_(arrived) if replace else flat.add_(arrived)
            # Autograd must notice: who saved a weight for a backward pass that is still to come gets its error.
            torch.autograd.graph.increment_version(self._bucket.parameters)
            return
        arrived_views = [view.to(self._bucket.device, non_blocking=True) for view in self._average_views]
        if replace:
            torch._foreach_copy_(self._tensors(), arrived_views)
        else:
            torch._foreach_add_(self._tensors(), arrived_views)


def parts_of_buffers(buffers: Buffers, communicator: Communicator) -> list[Part]:
    """Floating-point buffers, one part for each dtype and device. Modules may replace them, so their names are kept.

    Args:
        buffers: function that returns the buffers of a module.
        communicator: provides memory.
    """
    found = [(name, buffer) for name, buffer in buffers().items() if buffer.is_floating_point()]
    parts: list[Part] = []
    for members in form_buckets(
        found, key=lambda item: (item[1].dtype, item[1].device), nbytes=lambda item: item[1].nbytes, bucket_bytes=2**63
    ):
        names = [name for name, _ in members]
        like = cast("list[torch.nn.Parameter]", [buffer for _, buffer in members])
        bucket = Bucket(len(parts), names, like, communicator, fusion=False)
        parts.append(Part(bucket, functools.partial(_named, buffers, names)))
    return parts


def _named(buffers: Buffers, names: Sequence[str]) -> list[torch.Tensor]:
    found = buffers()
    return [found[name] for name in names]
