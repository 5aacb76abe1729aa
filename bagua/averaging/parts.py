"""Weights and buffers as the training thread sees them: copied to the desk, and changed by what comes back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from bagua.averaging.handoff import Parcel
from bagua.buckets import Bucket, form_buckets
from bagua.comm import Communicator, copy_flat
from bagua.errors import ConfigurationError

__all__ = ["Buffers", "Part", "parts_of_buffers"]

#: Returns the buffers of a module as they are now, by name.
Buffers = Callable[[], Mapping[str, torch.Tensor]]


class Part:
    """The tensors of one bucket, and the parcel in which they travel. For the training thread only.

    Args:
        bucket: the layout; its parameters are what is averaged.
        fetch: returns the tensors to use in place of the bucket's own, in the same order, for
            tensors that a module may replace.
    """

    def __init__(self, bucket: Bucket, fetch: Callable[[], Sequence[torch.Tensor]] | None = None) -> None:
        self._bucket = bucket
        self._fetch = fetch
        self._on_host = bucket.device.type == "cpu"
        self.parcel = Parcel(self._memory(), self._memory())
        self._snapshot_views = bucket.views(self.parcel.snapshot)
        self._average_views = bucket.views(self.parcel.average)

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
        """Copy the tensors into ``parcel.snapshot``; from a device, without waiting for it."""
        flat = self._flat()
        if flat is not None and self._on_host:
            copy_flat(self.parcel.snapshot, flat)
        elif flat is not None:
            self.parcel.snapshot.copy_(flat, non_blocking=True)
        else:
            torch._foreach_copy_(self._snapshot_views, self._tensors(), non_blocking=not self._on_host)
        if self._bucket.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._bucket.device))
            self.parcel.arrived = event.synchronize

    @torch.no_grad()
    def take_average(self, *, replace: bool) -> None:
        """Add ``parcel.average`` to the tensors, or put it in their place."""
        flat = self._flat()
        if flat is not None:
            arrived = self.parcel.average.to(flat.device, non_blocking=True)
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
        buffers: of a module.
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
