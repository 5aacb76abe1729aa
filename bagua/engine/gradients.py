"""Looking at gradients: whether an optimizer's are finite, and whether they can be taken, and which no rank has.

Then gradients on their way into the buckets, as they arrive in a backward pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from bagua.buckets import Bucket
from bagua.engine.buckets.layout import unusable
from bagua.errors import ConfigurationError


def has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` has gradients to step with, and none of them has an Inf or NaN."""
    given = [one.grad for one in stepped_by(optimizer) if one.grad is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in given]
    gradients = [one for one in dense if one.numel()]  # There is no largest one among none.
    if not gradients:
        return bool(given)
    # The usual norm takes a twentieth of the time that the largest element takes on the CPU, but it may overflow.
    norms = torch._foreach_norm  # noqa: SLF001 - as in clip_grad_norm_
    return _are_finite(norms(gradients)) or _are_finite(norms(gradients, float("inf")))


def _are_finite(norms: Sequence[torch.Tensor]) -> bool:
    # One look at the device for all of them, in a dtype that holds what each of theirs does.
    together = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
    return bool(together.isfinite().all())


def optimizers_of(
    optimizers: Sequence[torch.optim.Optimizer], arrived: Collection[torch.Tensor]
) -> Sequence[torch.optim.Optimizer]:
    """Those of ``optimizers`` that step one of the parameters ``arrived``; all, if none does."""
    came = set(map(id, arrived))
    found = [one for one in optimizers if not came.isdisjoint(id(each) for each in stepped_by(one))]
    return found or optimizers


def sentinels_of(
    optimizers: Sequence[torch.optim.Optimizer],
    trained: Collection[torch.nn.Parameter],
    arrived: Collection[torch.nn.Parameter],
) -> tuple[torch.nn.Parameter, ...]:
    """One parameter of each optimizer, whose gradient tells of a pass: one that has ``arrived``, if one has.

    For phases without an exchange of gradients.
    """
    ours, came = set(trained), set(arrived)
    found: dict[torch.nn.Parameter, None] = {}
    for optimizer in optimizers:
        own = [one for one in stepped_by(optimizer) if one in ours]
        found.update(dict.fromkeys([one for one in own if one in came][-1:] or own[-1:]))
    return tuple(found)


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """The parameters of all groups of ``optimizer``."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def refuse_graph(_: torch.nn.Parameter) -> None:
    """Refuse a gradient that has a graph of its own."""
    raise ConfigurationError(
        "gradients with a graph of their own cannot be put into a bucket",
        argument="create_graph",
        expected="backward(create_graph=False)",
        seen=True,
        advice="Use torch.autograd.grad(create_graph=True) for the inner derivative.",
    )


#: Gradients are put into a bucket together when they are so many bytes: from autograd's code to a copy and back costs
#: microseconds. They are still in the processor's cache then, and take little memory beside the bucket.
_TOGETHER_BYTES = 64 * 1024
#: Up to here gradients are copied together, and multiplied together when the bucket is complete; a larger one is
#: multiplied on its way.
_SMALL_BYTES = 16 * 1024


class Slot:
    """One parameter in its bucket, as the hooks see it.

    Attributes:
        arrival: arrival of the gradients of the bucket.
        view: the parameter's part of the flat gradients; None if they are not gathered.
        nbytes: bytes of ``view``.
        closes: True if gradients that are waiting are gathered when this one comes.
        ready: number of the last backward pass that brought its gradient.
    """

    __slots__ = ("arrival", "closes", "name", "nbytes", "parameter", "ready", "view")

    def __init__(self, name: str, parameter: torch.nn.Parameter, arrival: Arrival, view: torch.Tensor | None) -> None:
        self.name = name
        self.parameter = parameter
        self.arrival = arrival
        self.view = view
        self.nbytes = 0 if view is None else view.nbytes
        self.closes = False
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
    """

    __slots__ = (
        *("_factor", "_has_large", "_small", "_small_bytes", "bucket"),
        *("fusion", "pending", "scale", "slots", "waiting"),
    )

    def __init__(self, bucket: Bucket, *, gathers: bool) -> None:
        flat = bucket.gradients if gathers else None
        views: Sequence[torch.Tensor | None] = [None] * len(bucket.names) if flat is None else bucket.gradient_views
        self.bucket = bucket
        self.slots = [
            Slot(name, parameter, self, view)
            for name, parameter, view in zip(bucket.names, bucket.parameters, views, strict=True)
        ]
        # A gradient that stays where it is may be of a wider dtype (``grad_dtype``): multiply it before it is rounded.
        self._small_bytes = small_bytes = _SMALL_BYTES if bucket.fusion else -1
        places = zip(self.slots, bucket.offsets, (*bucket.offsets[1:], bucket.numel), strict=True)
        small = _runs([(first, stop) for slot, first, stop in places if slot.nbytes <= small_bytes])
        #: The parts of the flat gradients that hold small ones.
        self._small = [] if flat is None else [flat[first:stop] for first, stop in small]
        self._has_large = any(slot.nbytes > small_bytes for slot in self.slots)
        self.pending = len(self.slots)
        self.fusion = bucket.fusion
        self.scale: torch.Tensor | None = None
        self._factor = 1.0
        self.waiting: list[Slot] = []
        together = 0
        for slot in self.slots:  # Gradients come in their order, as a rule.
            together += slot.nbytes
            if together > _TOGETHER_BYTES:
                slot.closes, together = True, 0

    def begin(self, factor: float) -> None:
        """A backward pass starts, whose gradients are multiplied by ``factor``."""
        self.pending = len(self.slots)
        if factor != self._factor:
            self._factor = factor
            # As a tensor it multiplies in a third of the time that a Python number takes.
            exact = self.bucket.dtype in (torch.float32, torch.float64)
            dtype = self.bucket.dtype if exact else torch.float64
            self.scale = None if factor == 1.0 else torch.tensor(factor, dtype=dtype, device="cpu")
        self.waiting = []

    def gather(self) -> None:
        """Put the gradients that are waiting into the bucket. The last ones complete it: small ones are multiplied."""
        waiting, self.waiting = self.waiting, []
        gradients: list[Any] = [slot.parameter.grad for slot in waiting]
        try:
            self._copy(waiting, gradients)
        except (RuntimeError, TypeError):
            for slot, gradient in zip(waiting, gradients, strict=True):
                if gradient is None or gradient.layout is not torch.strided:
                    raise unusable(slot.name, gradient) from None
            raise
        if self.fusion:
            for slot in waiting:
                slot.parameter.grad = slot.view
        if self.pending == 0 and self.scale is not None:
            for part in self._small:
                part.mul_(self.scale)

    def _copy(self, slots: list[Slot], gradients: list[Any]) -> None:
        scale, views = self.scale, [slot.view for slot in slots]
        if scale is None or not self._has_large:
            if views:
                torch._foreach_copy_(views, gradients)  # type: ignore[arg-type]
            return
        for slot, view, gradient in zip(slots, views, gradients, strict=True):
            assert view is not None
            if slot.nbytes > self._small_bytes:
                torch.mul(gradient, scale, out=view)
            else:
                view.copy_(gradient)


def _runs(parts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same parts of flat memory, those that follow each other as one."""
    first = stop = 0
    for begin, end in parts:
        if begin != stop:
            if stop > first:
                yield first, stop
            first = begin
        stop = end
    if stop > first:
        yield first, stop
