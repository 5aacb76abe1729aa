"""One byte for each element, with one range for each block."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from bagua.compression.codec import Metadata, store
from bagua.compression.packing import SeededBlocks, mixed_seed, noise_like

__all__ = ["MinMaxUInt8"]

#: A step that is a little longer than a 255th of the range, and a first code that is a little
#: lower than rounding says: so no rounding error can take a code below 0 or above 255.
_SLACK = 1 + 2.0**-15
_LOWER_BY = 2.0**-8

#: The lowest bits of a float64; without them it has 16 significant ones.
_DROPPED_BITS = 2**37 - 1


class _Exact(NamedTuple):
    """How arithmetic is done for a dtype.

    Adding ``magic`` to a small float rounds it to an integer, which then is what the lowest
    bits say. That takes one pass where rounding and conversion take three.
    """

    dtype: torch.dtype
    bits: torch.dtype
    magic: float


_SINGLE = _Exact(torch.float32, torch.int32, 1.5 * 2.0**23)
_DOUBLE = _Exact(torch.float64, torch.int64, 1.5 * 2.0**52)


@dataclass(frozen=True)
class MinMaxUInt8(SeededBlocks):
    """One byte for each element: the index of the nearest of 256 equidistant values between the block's extremes.

    With ``low`` and ``high`` the extremes of a block, ``step = (high - low) / 255``, rounded up
    to 16 significant bits, ``x' = first + step * q`` and ``q = round((x - first) / step)``.

    * ``|x' - x| <= (high - low) / 510 * (1 + 1e-4)``, and the rounding of the dtype.
    * Where a block's range contains zero, ``first`` is a multiple of ``step``, so zero
      is reproduced exactly. A block of equal elements is reproduced exactly, too.
    * A block with a NaN or Inf becomes NaN as a whole, so that it is not overlooked; so does one
      whose range is beyond ``3.3e38`` (in float64 ``1.7e308``). No block becomes infinite.
    * Differences below ``2 ** -126`` (in float64 ``2 ** -1022``) are lost.

    With a ``seed`` each element becomes one of the two values next to it, at random, so that its expected value is
    right up to a 131072nd of a step; ``step`` is a 254th of the range then, and an element is off by less than one.

    Args:
        block_numel: elements that share a range; the last block may have fewer. Smaller
            blocks are more exact, at 8 bytes each (16 in float64).
        seed: seed of random numbers to round with; reducers draw others on each rank and in each step. None: round to
            the nearest.

    Raises:
        ConfigurationError: ``block_numel`` is no positive integer, or an option of a wrong type.

    Example:
        >>> codec = MinMaxUInt8()
        >>> tensor = torch.tensor([-1.0, 0.0, 0.5, 1.0])
        >>> data = codec.compress(tensor)
        >>> data.shape
        torch.Size([16])
        >>> (codec.decompress(data, Metadata.of(tensor)) - tensor).abs().max() < 0.004
        tensor(True)
    """

    block_numel: int = 2048
    seed: int | None = None

    bits: ClassVar[int] = 8
    numbers_per_block: ClassVar[int] = 2

    @property
    def contraction(self) -> float:
        """An element is off by at most a 255th of the range, the square of which is at most twice that of the block."""
        return max(0.0, 1.0 - self.block_numel * 2 / _steps(stochastic=self.unbiased) ** 2)

    def _split(self, data: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        numbers, codes = super()._split(data, metadata)
        return numbers.view(2, -1, 1).transpose(0, 1), codes  # All first values lie before all steps.

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        numbers, codes = self._split(out, Metadata(flat.numel(), flat.dtype))
        kernels = _kernels(flat.device.type) if self.seed is None else None
        if kernels is not None and kernels.suits(self.block_numel, flat.dtype):
            kernels.encode(flat, *numbers.unbind(1), codes, self.block_numel)
        else:
            _encode_pieces(self._pieces(flat, numbers, codes), numbers, flat.dtype, self.seed)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        numbers, codes = self._split(data, metadata)
        kernels = _kernels(out.device.type)
        if kernels is not None and kernels.suits(self.block_numel, metadata.dtype):
            largest = torch.finfo(metadata.dtype).max
            kernels.decode(codes, *numbers.unbind(1), out, self.block_numel, add=add, limit=largest)
        else:
            limit = _limit(numbers, metadata.dtype)
            for rows, own, coded in self._pieces(out, numbers, codes):
                first, step = own.unbind(1)
                direct = rows.dtype == own.dtype and not add
                values = rows.copy_(coded) if direct else coded.to(own.dtype)
                values.mul_(step).add_(first)
                if limit is not None:
                    values.clamp_(-limit, limit)
                if not direct:
                    store(values, rows, add)


@functools.cache
def _kernels(device_type: str) -> Any:
    """The module ``minmax_kernels`` if it can run there; else None."""
    if device_type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("bagua.compression.minmax_kernels")


def _steps(*, stochastic: bool) -> int:
    """Steps in the range of a block. Rounding up and down at the lower end takes one more than rounding to nearest."""
    return 254 if stochastic else 255


def _encode_pieces(
    pieces: Sequence[tuple[torch.Tensor, ...]], numbers: torch.Tensor, dtype: torch.dtype, seed: int | None
) -> None:
    exact = _DOUBLE if dtype == torch.float64 else _SINGLE
    # While a piece is in the cache, its other extreme comes nearly for free.
    extremes = [(rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)) for rows, _, _ in pieces]
    low, high = (torch.cat(values) for values in zip(*extremes, strict=True))
    origin, bias, finite = _set_grid(low.double(), high.double(), numbers, exact, stochastic=seed is not None)
    on_cpu = numbers.device.type == "cpu"  # Elsewhere a look at the values would wait for them.
    shifted = dtype != exact.dtype or not on_cpu or bool(origin.any())
    all_finite = on_cpu and bool(finite.all())
    sizes = [len(rows) for rows, _, _ in pieces]
    grids = zip(origin.split_with_sizes(sizes), bias.split_with_sizes(sizes), strict=True)
    for number, ((rows, own, codes), (origins, biases)) in enumerate(zip(pieces, grids, strict=True)):
        step = own[:, 1]
        scaled = (rows.to(exact.dtype) - origins if shifted else rows) * step.reciprocal()
        if seed is not None:  # To nearest, half a step lower and less than one higher.
            scaled.add_(noise_like(scaled, mixed_seed(seed, number)).sub_(0.5))
        codes.copy_(scaled.add_(biases).view(exact.bits))
        if not all_finite:
            codes.masked_fill_(step.isnan(), 0)


def _set_grid(
    low: torch.Tensor, high: torch.Tensor, numbers: torch.Tensor, exact: _Exact, *, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choose the first value and the step of each block from its extremes.

    Returns:
        What to subtract from elements; what to add after the division by the step so that
        the lowest bits are the code; whether the block is finite.
    """
    # Divided before subtracted, because the range itself may overflow.
    steps = _steps(stochastic=stochastic)
    wanted = high.div(steps).sub_(low / steps).mul_(_SLACK).clamp_(min=torch.finfo(exact.dtype).tiny)
    # With 16 significant bits in a step, its multiples up to 255 are exact in float32, with fused additions or without.
    wanted = (wanted.view(torch.int64) + _DROPPED_BITS).bitwise_and_(~_DROPPED_BITS).view(torch.float64)
    # A NaN fails every comparison.
    finite = (low.abs() < torch.inf) & (256 * wanted <= torch.finfo(exact.dtype).max)
    contains_zero = (low <= 0) & (high >= 0)
    lowest = low.div(wanted).sub_(_LOWER_BY)
    below_zero = torch.where(contains_zero, lowest.floor_() if stochastic else lowest.round_(), 0)
    origin = torch.where(contains_zero, 0, low)
    first, step = numbers.unbind(1)
    first.copy_(below_zero.mul(wanted).add_(origin).where(finite, torch.nan))
    step.copy_(wanted.where(finite, torch.nan))
    return origin.to(exact.dtype), (exact.magic - below_zero).to(exact.dtype), finite


def _limit(numbers: torch.Tensor, dtype: torch.dtype) -> float | None:
    """The largest finite value of ``dtype``, if a block's grid may reach beyond it by half a step; else None."""
    largest = torch.finfo(dtype).max
    if numbers.device.type == "cpu":
        first, step = numbers.unbind(1)
        reach = torch.maximum(first.abs(), (step * 255).add_(first).abs_())
        return largest if (reach > largest).any() else None
    return largest
