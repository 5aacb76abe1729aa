"""Buckets: parameters that are exchanged together, with their gradients and weights in flat memory."""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bagua.comm import Communicator, copy_flat
from bagua.errors import ConfigurationError

__all__ = ["Bucket", "check_align_bytes", "form_buckets", "padded_numel"]

_log = logging.getLogger("bagua")

Key = TypeVar("Key")
Member = TypeVar("Member")

#: Every tensor starts at a multiple of this inside flat memory: what torch's own
#: allocator gives, and what vector units and tensor cores run fastest on.
TENSOR_ALIGNMENT_BYTES = 64
#: Gradients are put into a bucket together when they are so many bytes: from autograd's code to a copy and back costs
#: microseconds. They are still in the processor's cache then, and take little memory beside the bucket.
_TOGETHER_BYTES = 64 * 1024
#: Up to here gradients are copied together, and multiplied together when the bucket is complete; a larger one is
#: multiplied on its way.
_SMALL_BYTES = 16 * 1024
_gradient_of = operator.attrgetter("grad")


def form_buckets(
    members: Iterable[Member],
    *,
    key: Callable[[Member], Key],
    nbytes: Callable[[Member], int],
    bucket_bytes: int,
    first_bytes: int | None = None,
) -> list[list[Member]]:
    """Cut an ordered sequence into buckets of one key each, in the order in which they fill up.

    Args:
        members: items to put into buckets, in the order in which they become ready.
        key: properties that all members of a bucket have in common (dtype and device).
        nbytes: size of a member, in bytes.
        bucket_bytes: a bucket is closed as soon as it holds so many bytes; only the last
            bucket of each key may hold fewer.
        first_bytes: the first bucket is closed earlier, as soon as it holds so many; None if it is like the others.

    Returns:
        Buckets, each member in exactly one of them, ordered by their last member.

    Example:
        >>> form_buckets([3, 1, 4, 1, 5], key=lambda _: 0, nbytes=lambda size: size, bucket_bytes=4)
        [[3, 1], [4], [1, 5]]
    """
    limit = bucket_bytes if first_bytes is None else min(first_bytes, bucket_bytes)
    full: list[tuple[int, list[Member]]] = []
    filling: dict[Key, tuple[int, int, list[Member]]] = {}
    for position, member in enumerate(members):
        kind = key(member)
        held, _, bucket = filling.pop(kind, (0, 0, []))
        bucket.append(member)
        held += nbytes(member)
        if held >= limit:
            full.append((position, bucket))
            limit = bucket_bytes
        else:
            filling[kind] = (held, position, bucket)
    full += [(position, bucket) for _, position, bucket in filling.values()]
    return [bucket for _, bucket in sorted(full, key=lambda item: item[0])]


def check_align_bytes(align_bytes: int) -> int:
    """``align_bytes`` if it is a power of two of at least 8.

    Raises:
        ConfigurationError: it is not.
    """
    if type(align_bytes) is not int or align_bytes < 8 or align_bytes & (align_bytes - 1):
        raise ConfigurationError(
            "buckets cannot be aligned to this number of bytes",
            argument="align_bytes",
            expected="a power of two, at least 8",
            seen=align_bytes,
        )
    return align_bytes


def padded_numel(numel: int, itemsize: int, align_bytes: int, shares: int) -> int:
    """The smallest size >= ``numel`` that splits into ``shares`` parts of aligned size.

    Args:
        numel: elements that are needed.
        itemsize: bytes of an element.
        align_bytes: each share is a multiple of so many bytes.
        shares: number of equal parts.

    Example:
        >>> padded_numel(10, itemsize=4, align_bytes=8, shares=3)
        12
    """
    unit = shares * (align_bytes // math.gcd(align_bytes, itemsize))
    return max(-(-numel // unit), 1) * unit


def _dense_view(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor like ``like`` (same strides if they are dense) over its slice of ``flat``.

    It has a storage of its own that covers just the slice. So a saved or deep-copied
    parameter does not drag its whole bucket along, and changing one parameter in place
    does not invalidate what autograd saved of its neighbours.
    """
    start = (flat.storage_offset() + offset) * flat.itemsize
    storage = flat.untyped_storage()[start : start + like.numel() * flat.itemsize]
    view = torch.empty(0, dtype=flat.dtype, device=flat.device)
    return view.set_(storage, 0, like.shape, _dense_stride(like))


def _dense_stride(like: torch.Tensor) -> tuple[int, ...]:
    return torch.empty_like(like, device="meta", memory_format=torch.preserve_format).stride()


def _runs(parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
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


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor if tensor.stride() == _dense_stride(tensor) else tensor.clone()
    return dense.as_strided((dense.numel(),), (1,))


@torch.no_grad()
def write_finite(named: Mapping[str, torch.Tensor], means: Sequence[torch.Tensor]) -> None:
    """Make means the values of the tensors of these names, each that is finite: constants may be infinite."""
    if not named:
        return
    flags = torch.stack([torch.isfinite(one).all() for one in (*means, *named.values())]).tolist()
    after, before = flags[: len(means)], flags[len(means) :]
    for name, mean, is_finite, was_finite in zip(named, means, after, before, strict=True):
        if is_finite:
            named[name].copy_(mean)
        elif was_finite:
            _log.warning("Buffer %s stays as this rank has it: on another rank it is not finite, nor is the mean", name)


class Bucket:
    """Parameters of one dtype on one device that are exchanged in one go.

    Args:
        index: position among the buckets of the model; exchanges start in this order.
        names: name of each parameter.
        parameters: parameter of each name, in the same order.
        communicator: provides memory that it can exchange without a copy.
        align_bytes: the flat memory is padded to a multiple of so many bytes.
        shares: the flat memory splits evenly into so many parts of aligned size.
        fusion: gradients and weights live in the flat memory and parameters hold views of
            it. Otherwise they stay where they are, and gradients are copied in and out.
        by_arrival: it follows the order in which gradients appear, as all buckets of a model do, but those of parts
            that are cut in another way.
        dtype: dtype of flat memory, without ``fusion``; None for that of the parameters.

    Attributes:
        offsets: start of each parameter in flat memory, in elements.
        numel: elements of flat memory, padding (always zero in ``gradients``) included.
        gradients: flat memory of the gradients, once ``allocate_gradients`` was called.
        gradient_views: the part of each parameter in it, with the parameter's strides.
        weights: flat memory of the weights, with ``fusion``; else None.
        communicator: provides memory that it can exchange without a copy.
        gathers: True if gradients are put into flat memory as they arrive in a backward pass.
        arrived_in: number of the backward pass in which the gradient of each parameter came last; -1 if it never did.
        pending: gradients that are still missing in this backward pass.
        waiting: positions of parameters whose gradients are there, and not yet in flat memory.
        gathers_at: whether what is waiting is gathered when the gradient of the parameter in this position comes.

    Example:
        >>> from bagua.comm import solo_group
        >>> layer = torch.nn.Linear(2, 2)
        >>> names, parameters = zip(*layer.named_parameters())
        >>> bucket = Bucket(0, names, parameters, solo_group().global_communicator)
        >>> bucket
        Bucket(0, ['weight', 'bias'], 24 bytes of torch.float32)
    """

    def __init__(
        self,
        index: int,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        communicator: Communicator,
        *,
        align_bytes: int = 8,
        shares: int = 1,
        fusion: bool = True,
        by_arrival: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        first = parameters[0]
        self.index = index
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self.dtype = dtype or first.dtype
        self.device = first.device
        self.fusion = fusion
        self.by_arrival = by_arrival
        self.communicator = communicator
        self.offsets, end = self._place()
        self.numel = padded_numel(end, self.dtype.itemsize, align_bytes, shares)
        self.gradients: torch.Tensor | None = None
        self.gradient_views: list[torch.Tensor] = []
        self.weights: torch.Tensor | None = None
        self.expect_gradients(gather=False)

    def _place(self) -> tuple[tuple[int, ...], int]:
        unit = TENSOR_ALIGNMENT_BYTES // math.gcd(TENSOR_ALIGNMENT_BYTES, self.dtype.itemsize)
        offsets, end = [], 0
        for parameter in self.parameters:
            start = -(-end // unit) * unit
            offsets.append(start)
            end = start + parameter.numel()
        return tuple(offsets), end

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters, without padding."""
        return sum(parameter.numel() for parameter in self.parameters) * self.dtype.itemsize

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The part of each parameter in ``flat``, a tensor of ``numel`` elements laid out like this bucket."""
        return [
            _dense_view(flat, offset, parameter)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]

    def empty(self) -> torch.Tensor:
        """Flat memory for this bucket that can be exchanged without a copy, filled with zeros."""
        return self.communicator.empty(self.numel, dtype=self.dtype, device=self.device).zero_()

    def padding(self) -> torch.Tensor | None:
        """Positions in flat memory that belong to no parameter; None if there are none."""
        ends = [offset + one.numel() for offset, one in zip(self.offsets, self.parameters, strict=True)]
        gaps = zip([0, *ends], [*self.offsets, self.numel], strict=True)
        free = [torch.arange(end, begin, device="cpu") for end, begin in gaps if end < begin]
        return torch.cat(free).to(self.device) if free else None

    def allocate_gradients(self) -> torch.Tensor:
        """Make the flat memory of the gradients; the gradients themselves are moved in as they arrive."""
        if self.gradients is None:
            self.gradients = self.empty()
            self.gradient_views = self.views(self.gradients)
        return self.gradients

    def expect_gradients(self, *, gather: bool) -> None:
        """Count the gradients of each backward pass as they arrive, and put them into flat memory, if ``gather``."""
        self.gathers = gather
        self.arrived_in, self.gathers_at = [-1] * len(self.names), [False] * len(self.names)
        self.pending = len(self.names)
        self.waiting: list[int] = []
        self._factor = 1.0
        self._scale: torch.Tensor | None = None
        if not gather:
            return
        flat, sizes = self.allocate_gradients(), [view.nbytes for view in self.gradient_views]
        # A gradient that stays where it is may be of a wider dtype (``grad_dtype``): multiply it before it is rounded.
        limit = _SMALL_BYTES if self.fusion else -1
        self._large = [nbytes > limit for nbytes in sizes]
        self._has_large = any(self._large)
        places = zip(self._large, self.offsets, (*self.offsets[1:], self.numel), strict=True)
        #: The parts of flat memory that hold small ones.
        self._small = [flat[first:stop] for first, stop in _runs((one[1], one[2]) for one in places if not one[0])]
        together = 0
        for position, nbytes in enumerate(sizes):  # Gradients come in this order, as a rule.
            together += nbytes
            if together > _TOGETHER_BYTES:
                self.gathers_at[position], together = True, 0
        self.gathers_at[-1] = True

    def gathering_ends(self) -> Iterator[torch.Tensor]:
        """The parameters at whose gradients what is waiting is gathered."""
        return itertools.compress(self.parameters, self.gathers_at)

    def begin_backward(self, factor: float) -> None:
        """A backward pass starts, whose gradients are multiplied by ``factor`` when they are gathered."""
        self.pending = len(self.names)
        self.waiting = []
        if factor != self._factor:
            self._factor = factor
            # As a tensor it multiplies in a third of the time that a Python number takes.
            dtype = self.dtype if self.dtype in (torch.float32, torch.float64) else torch.float64
            self._scale = None if factor == 1.0 else torch.tensor(factor, dtype=dtype, device="cpu")

    def take_run(self, parameters: Sequence[torch.Tensor], last: int, number: int) -> bool:
        """Take the gradients of ``parameters`` in backward pass ``number`` at once, and gather what is waiting.

        Args:
            parameters: parameters in the order in which their gradients came.
            last: position of the last of them.
            number: as in ``arrived_in``.

        Returns:
            True if they are those before ``last``, without a gap, and came for the first time; else nothing is done.
        """
        first, stop = last + 1 - len(parameters), last + 1
        if first < 0 or not all(map(operator.is_, self.parameters[first:stop], parameters)):
            return False
        if number in self.arrived_in[first:stop]:
            return False
        self.arrived_in[first:stop] = [number] * len(parameters)
        self.pending -= len(parameters)
        self.waiting += range(first, stop)
        self.gather_waiting()
        return True

    def gather_waiting(self) -> None:
        """Put the gradients that are waiting into flat memory. The last ones complete it: small ones are multiplied."""
        waiting, self.waiting = self.waiting, []
        parameters = list(map(self.parameters.__getitem__, waiting))
        views = list(map(self.gradient_views.__getitem__, waiting))
        try:
            self._copy_gradients(waiting, views, list(map(_gradient_of, parameters)))
        except (RuntimeError, TypeError):
            self._refuse_unusable(waiting)
            raise
        if self.fusion:
            deque(map(setattr, parameters, itertools.repeat("grad"), views), maxlen=0)  # A loop that runs no Python.
        if self.pending == 0 and self._scale is not None:
            for part in self._small:
                part.mul_(self._scale)

    def _copy_gradients(self, positions: list[int], views: list[torch.Tensor], gradients: list[Any]) -> None:
        scale = self._scale
        if scale is None or not self._has_large:
            if views:
                torch._foreach_copy_(views, gradients)
            return
        for position, view, gradient in zip(positions, views, gradients, strict=True):
            if self._large[position]:
                torch.mul(gradient, scale, out=view)
            else:
                view.copy_(gradient)

    def zero_gradient(self, position: int) -> None:
        """The parameter in this position has no gradient in this backward pass: count it as zero."""
        self.pending -= 1
        if self.gathers:
            self.gradient_views[position].zero_()
            if self.fusion:
                self.parameters[position].grad = self.gradient_views[position]
            if self.pending == 0:
                self.gather_waiting()

    def _refuse_unusable(self, positions: Iterable[int]) -> None:
        """Refuse gradients that cannot be put into flat memory."""
        for position in positions:
            gradient = self.parameters[position].grad
            if gradient is not None and gradient.layout is torch.strided:
                continue
            advice = "Use sparse=False, or name it in module._ddp_params_and_buffers_to_ignore."
            if gradient is None:
                advice = "A hook that steps the parameter and drops its gradient cannot be combined with bagua."
            raise ConfigurationError(
                f"the gradient of {self.names[position]} cannot be put into a bucket",
                argument="module",
                expected="a dense gradient",
                seen="None" if gradient is None else gradient.layout,
                advice=advice,
            )

    @torch.no_grad()
    def gather_gradients(self, factor: float = 1.0) -> None:
        """Copy all gradients, times ``factor``, into flat memory at once: zeros for a parameter that has none.

        Raises:
            ConfigurationError: one of them is not dense.
        """
        self.allocate_gradients()
        self._refuse_unusable(position for position, one in enumerate(self.parameters) if one.grad is not None)
        for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.mul(parameter.grad, factor, out=view)

    @torch.no_grad()
    def return_gradients(self) -> None:
        """Copy flat memory to where the optimizer looks for gradients."""
        for parameter, view in zip(self.parameters, self.gradient_views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.clone()
            else:
                parameter.grad.copy_(view)

    def fuse_weights(self, *, exchangeable: bool = False) -> None:
        """Move the weights into one flat block; the parameters stay the same objects.

        Args:
            exchangeable: True puts the block into memory that can be exchanged without a copy.
        """
        if not self.fusion or self.weights is not None:
            return
        with torch.no_grad():
            if exchangeable:
                self.weights = self.empty()
            else:
                self.weights = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
            for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
                view.copy_(parameter)
                parameter.data = view

    def follow(self, tensors: Mapping[str, Any]) -> None:
        """Read and write these from now on, which have taken the places of those that the bucket was made of."""
        self.parameters = tuple(tensors[name] for name in self.names)

    @torch.no_grad()
    def read_weights(self, flat: torch.Tensor) -> torch.Tensor:
        """Copy the weights into ``flat``, laid out like this bucket, and return it."""
        if self.weights is not None:
            copy_flat(flat, self.weights)
            return flat
        torch._foreach_copy_(self.views(flat), list(self.parameters))
        return flat

    @torch.no_grad()
    def subtract_weights(self, minuend: torch.Tensor, *, out: torch.Tensor) -> None:
        """Write ``minuend`` minus the weights into ``out``, both laid out like this bucket, in one pass."""
        if self.weights is not None:
            torch.sub(minuend, self.weights, out=out)
            return
        for whole, weights, difference in zip(self.views(minuend), self.parameters, self.views(out), strict=True):
            torch.sub(whole, weights, out=difference)

    @torch.no_grad()
    def write_weights(self, flat: torch.Tensor) -> None:
        """Copy ``flat``, laid out like this bucket, into the weights."""
        torch._foreach_copy_(list(self.parameters), self.views(flat))

    def memory(self) -> list[torch.Tensor]:
        """The elements of each parameter in the order of flat memory, where they lie; copies where they have gaps."""
        return [_memory_of(parameter.detach()) for parameter in self.parameters]

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {list(self.names)}, {self.nbytes} bytes of {self.dtype})"
