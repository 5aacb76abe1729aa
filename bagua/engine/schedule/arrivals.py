"""Gradients on their way into the buckets, as they arrive in a backward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.buckets import Bucket
from bagua.engine.buckets.layout import unusable

#: Gradients are put into a bucket together when they are so many bytes: from autograd's code to a copy and back costs
#: microseconds. They are still in the processor's cache then, and take little memory beside the bucket.
TOGETHER_BYTES = 64 * 1024


class Slot:
    """One parameter in its bucket, as the hooks see it.

    Attributes:
        arrival: arrival of the gradients of the bucket.
        view: the parameter's part of the flat gradients; None if they are not gathered.
        nbytes: bytes of ``view``.
        ready: number of the last backward pass that brought its gradient.
    """

    __slots__ = ("arrival", "name", "nbytes", "parameter", "ready", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter, arrival: Arrival, view: torch.Tensor | None) -> None:
        self.name = name
        self.parameter = parameter
        self.arrival = arrival
        self.view = view
        self.nbytes = 0 if view is None else view.nbytes
        self.ready = -1


class Arrival:
    """The gradients of one bucket, as they arrive in a backward pass.

    Attributes:
        bucket: the bucket.
        slots: one for each parameter.
        pending: gradients that are still missing in this backward pass.
        fusion: True if parameters get their part of the flat gradients.
        scale: factor on gradients that are gathered in this step; None for 1.
        waiting: slots whose gradients are there, and not yet in the bucket.
        waiting_bytes: bytes of these gradients.
    """

    __slots__ = (
        "_factor",
        "bucket",
        "fusion",
        "pending",
        "scale",
        "slots",
        "waiting",
        "waiting_bytes",
    )

    def __init__(self, bucket: Bucket, *, gathers: bool) -> None:
        gathers = gathers and bucket.gradients is not None
        views: Sequence[torch.Tensor | None] = bucket.gradient_views if gathers else [None] * len(bucket.names)
        self.bucket = bucket
        self.slots = [
            Slot(name, parameter, self, view)
            for name, parameter, view in zip(bucket.names, bucket.parameters, views, strict=True)
        ]
        self.pending = len(self.slots)
        self.fusion = bucket.fusion
        self.scale: torch.Tensor | None = None
        self._factor = 1.0
        self.waiting: list[Slot] = []
        self.waiting_bytes = 0

    def begin(self, factor: float) -> None:
        """A backward pass starts, whose gradients are multiplied by ``factor``."""
        self.pending = len(self.slots)
        if factor != self._factor:
            self.scale = self._as_tensor(factor)
        self.waiting, self.waiting_bytes = [], 0

    def gather(self) -> None:
        """Put the gradients that are waiting into the bucket."""
        waiting, self.waiting, self.waiting_bytes = self.waiting, [], 0
        parameters, gradients, views = [], [], []
        for slot in waiting:
            gradient, view = slot.parameter.grad, slot.view
            assert view is not None
            if gradient is not view:
                if gradient is None or gradient.layout is not torch.strided:
                    raise unusable(slot.name, gradient)
                parameters.append(slot.parameter)
                gradients.append(gradient)
                views.append(view)
            elif self.scale is not None:
                view.mul_(self.scale)
        if self.scale is not None:
            for gradient, view in zip(gradients, views, strict=True):
                torch.mul(gradient, self.scale, out=view)
        elif views:
            torch._foreach_copy_(views, gradients)
        if self.fusion:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view

    def _as_tensor(self, factor: float) -> torch.Tensor | None:
        """``factor`` as a tensor, which multiplies in a third of the time that a Python number takes."""
        self._factor = factor
        exact = self.bucket.dtype in (torch.float32, torch.float64)
        if factor == 1.0:
            return None
        return torch.tensor(factor, dtype=self.bucket.dtype if exact else torch.float64, device="cpu")
