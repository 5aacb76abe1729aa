"""Four or two bits for each element: the number of one of 16 or 4 values, which each block has for itself.

Then one bit: the sign of an element; one magnitude for each block.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.compression import packing
from bagua.compression.codec import Metadata, store

__all__ = ["Int2", "Int4", "Sign"]

#: The values are spread over so many standard deviations.
_REACH = 6.0
#: Norms up to this, and down to one over this, have squares of which float32 loses nothing.
_ORDINARY = 1e15
#: The sum and the count of a bin fit in one double, with 16 bits for parts of a step, in blocks of up to this length.
_TOGETHER = 8192
#: So few bins are summed one after the other: additions to one place wait for each other.
_FEW = 4


@dataclass(frozen=True)
class _Levels(packing.SeededBlocks):
    """What ``Int4`` and ``Int2`` have in common: a table of values for each block, and the number of one for each."""

    block_numel: int = 4096
    seed: int | None = None

    #: Some forty operations work on each piece: to start them costs more than what no longer fits in the cache.
    times_cached: ClassVar[int] = 2

    @property
    def contraction(self) -> float:
        """What the means of the values in each bin keep at least of a block, whatever its distribution."""
        spread = math.sqrt(self.block_numel)
        if self.unbiased:  # Each element is off by less than a step.
            return max(0.0, 1.0 - 2 * self.block_numel / (self.numbers_per_block - 1) ** 2)
        width = _REACH / self.numbers_per_block
        # Elements near the mean may be lost; of the others in one bin, all of one sign, their mean keeps this much.
        outermost = (self.numbers_per_block / 2 - 1.5) * width
        kept = [4 * low * high / (low + high) ** 2 for low, high in ((width / 2, 1.5 * width), (outermost, spread))]
        return max(0.0, 1.0 - (width / 2) ** 2) * min(kept)

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        scratch = _Scratch(flat.device)
        for number, (rows, tables, packed) in enumerate(self._pieces(flat, *self._split(out, Metadata.of(flat)))):
            if self.seed is None:
                codes = _classify(rows, tables, scratch)
            else:
                values = scratch.like("values", rows, tables.dtype).copy_(rows)
                codes = _draw(values, tables, packing.mixed_seed(self.seed, number))
            packed.copy_(packing.pack_codes(codes, self.bits))

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        for rows, tables, packed in self._pieces(out, *self._split(data, metadata)):
            codes = packing.unpack_codes(packed, self.bits)[:, : rows.shape[1]]
            store(torch.gather(tables, 1, codes.long()), rows, add)


@dataclass(frozen=True)
class Int4(_Levels):
    """Four bits for each element: which of 16 values of its block is nearest.

    The range of six standard deviations around the mean of a block is cut in 16 bins of equal width; what lies outside
    belongs to the outermost ones. Each element becomes the mean of all elements in its bin, so no block gets longer.

    With a ``seed`` the 16 values lie at equal distances from the smallest to the largest element, and each element
    becomes one of the two next to it, at random, so that its expected value is right up to a 131072nd of a step.

    A block with a NaN or Inf, or of which the sum overflows, becomes NaN as a whole. A block of equal elements stays
    one.

    Args:
        block_numel: elements that share a table, a multiple of 8. Each block costs 64 bytes (128 in float64).
        seed: seed of random numbers to round with; reducers draw others on each rank and in each step. None: round to
            the nearest.

    Raises:
        ConfigurationError: an option that cannot be used.

    Example:
        >>> codec, tensor = Int4(), torch.linspace(-1, 1, 1000)
        >>> (codec.decompress(codec.compress(tensor), Metadata.of(tensor)) - tensor).abs().max() < 0.15
        tensor(True)

    Source: the statistical quantization of the CCLoco and MuLoCo repositories.
    """

    bits: ClassVar[int] = 4
    numbers_per_block: ClassVar[int] = 16


@dataclass(frozen=True)
class Int2(_Levels):
    """Two bits for each element: which of 4 values of its block is nearest. As ``Int4``; for use with error feedback.

    Args:
        block_numel: elements that share a table, a multiple of 8. Each block costs 16 bytes (32 in float64).
        seed: seed of random numbers to round with, or None; see ``Int4``. With it an element may be off by a third of
            the range.

    Raises:
        ConfigurationError: an option that cannot be used.

    Example:
        >>> codec, tensor = Int2(block_numel=8), torch.tensor([1.0, 1.0, -1.0, 3.0])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([ 1.,  1., -1.,  3.])
    """

    bits: ClassVar[int] = 2
    numbers_per_block: ClassVar[int] = 4


class _Scratch:
    """Memory that pieces use one after the other: to ask for new one takes as long as the work.

    Args:
        device: device on which the memory lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[str, torch.Tensor] = {}

    def like(self, name: str, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the shape of ``rows``, contents unknown."""
        found = self._found.get(name)
        if found is None or found.numel() < rows.numel():
            found = self._found[name] = torch.empty(rows.numel(), dtype=dtype, device=self._device)
        return found[: rows.numel()].view(rows.shape)


def _classify(rows: torch.Tensor, tables: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
    """The bin of each element, and the mean of each bin in ``tables``."""
    count, levels = rows.shape[1], tables.shape[1]
    means = rows.sum(dim=1, keepdim=True, dtype=tables.dtype).div_(count)
    values = torch.sub(rows, means, out=scratch.like("values", rows, tables.dtype))
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    finite = scales = None
    if rows.device.type != "cpu" or not _are_ordinary(norms):  # Elsewhere a look at the values would wait for them.
        # Scaled before they are squared, because squares overflow.
        scales = torch.maximum(values.amax(dim=1, keepdim=True), values.amin(dim=1, keepdim=True).neg_())
        finite = scales < torch.inf  # A NaN fails every comparison.
        scales = scales.where(finite & (scales > 0), 1)
        norms = torch.linalg.vector_norm(values.div_(scales), dim=1, keepdim=True)
        norms = norms.where(norms > 0, 1)
    steps = norms.mul_(_REACH / levels / math.sqrt(max(count - 1, 1)))
    values.mul_(steps.reciprocal())
    numbers = torch.add(values, levels / 2 + 0.5, out=scratch.like("numbers", rows, values.dtype))
    numbers.clamp_(0, levels - 0.5)
    if finite is not None:
        numbers.nan_to_num_(0.0)
    codes = scratch.like("codes", rows, torch.int16).copy_(numbers)  # which rounds down
    sums, counts = _sums_of_bins(values, numbers, codes, levels, scratch)
    averages = sums.div_(counts.clamp_(min=1)).mul_(steps)
    if scales is not None:
        averages.mul_(scales)
    averages.add_(means)
    tables.copy_(averages if finite is None else averages.where(finite, torch.nan))
    return scratch.like("bytes", rows, torch.uint8).copy_(codes)


def _are_ordinary(norms: torch.Tensor) -> bool:
    """Whether no norm is so small or so large, or no number at all, that squares may have lost something."""
    low, high = norms.aminmax()
    return low.item() > 1.0 / _ORDINARY and high.item() < _ORDINARY


def _sums_of_bins(
    rows: torch.Tensor, numbers: torch.Tensor, codes: torch.Tensor, levels: int, scratch: _Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and the count, of the elements of each row in each bin. ``numbers`` and ``codes`` tell their bins."""
    if levels > _FEW and rows.device.type == "cpu":
        return _scattered_sums(rows, codes, levels, scratch)
    numbers.floor_()
    sums, counts = torch.zeros(2, len(rows), levels, dtype=rows.dtype, device=rows.device)
    chosen = scratch.like("chosen", rows, rows.dtype)  # Elsewhere a scattered sum may come out another way each time.
    for level in range(levels):
        torch.eq(numbers, level, out=chosen)
        torch.sum(chosen, dim=1, out=counts[:, level])
        torch.sum(chosen.mul_(rows), dim=1, out=sums[:, level])
    return sums, counts


def _scattered_sums(
    rows: torch.Tensor, codes: torch.Tensor, levels: int, scratch: _Scratch
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``_sums_of_bins``, of values in steps."""
    count = rows.shape[1]
    places = scratch.like("places", rows, torch.int64).copy_(codes)
    wide = rows if rows.dtype == torch.float64 else scratch.like("wide", rows, torch.float64).copy_(rows)
    totals = torch.zeros(len(rows), levels, dtype=torch.float64, device=rows.device)
    if rows.dtype == torch.float64 or count > _TOGETHER:
        ones = totals.new_ones(len(rows), 1).expand_as(rows)
        counts = torch.zeros_like(totals).scatter_add_(1, places, ones)
        return totals.scatter_add_(1, places, wide).to(rows.dtype), counts.to(rows.dtype)
    # One addition for both: with each element comes more than any sum reaches. Both fit in the 53 bits of a double.
    longest = math.ceil(levels / _REACH * math.sqrt(count))
    beyond = 2.0 ** (count.bit_length() + longest.bit_length() + 1)
    totals.scatter_add_(1, places, wide.add_(beyond))
    counts = totals.div(beyond).round_()
    return totals.sub_(counts, alpha=beyond).float(), counts.float()


def _draw(rows: torch.Tensor, tables: torch.Tensor, seed: int) -> torch.Tensor:
    """One of the two values next to each element, and all of them in ``tables``. ``rows`` is overwritten."""
    levels = tables.shape[1]
    low, high = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
    # Divided before subtracted, because the range itself may overflow.
    steps = high.div(levels - 1).sub_(low / (levels - 1))
    finite = (low.abs() < torch.inf) & (steps < torch.inf)
    steps = steps.where(steps > 0, 1)
    # Halves, for the same reason: halving is exact.
    numbers = rows.div_(2).sub_(low / 2).div_(steps / 2).add_(packing.noise_like(rows, seed))
    numbers = numbers.floor_().clamp_(0, levels - 1).nan_to_num_(0.0)
    values = (torch.arange(levels, device=rows.device, dtype=tables.dtype) * (steps / 2) + low / 2).mul_(2)
    tables.copy_(torch.minimum(values, high).where(finite, torch.nan))
    return numbers.to(torch.int32).to(torch.uint8)


#: Eight bytes of 0 or 255, as one integer, become one byte: keep another bit of each, and add them up in the highest.
_ONE_BIT_OF_EACH_BYTE = int.from_bytes(bytes(1 << bit for bit in range(8)), "little", signed=True)
_ADD_BYTES_INTO_HIGHEST = 0x0101010101010101

#: How far a number is off, at most, when it is rounded to bfloat16.
_ROUNDED = 2.0**-8

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sign(packing.CodedBlocks):
    """One bit for each element: ``x' = sign(x) * mean(|x|)``, with the mean over the element's block.

    The mean is rounded to bfloat16, but for elements in float64. The error of a block of ``n`` elements is close to
    ``||x' - x||^2 = ||x||^2 - ||x||_1^2 / n``: less than the block itself, but no more than that, so this is for
    exchanges with error feedback. A zero becomes plus or minus the mean; a block of zeros stays one. A block with a NaN
    or Inf, or of which the sum overflows, becomes NaN as a whole.

    Args:
        block_numel: elements that share a magnitude, a multiple of 8; the last block may have fewer. Each block costs
            2 bytes (8 in float64).

    Raises:
        ConfigurationError: ``block_numel`` is no positive multiple of 8.

    Example:
        >>> codec, tensor = Sign(), torch.tensor([1.0, -2.0, 3.0])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([ 2., -2.,  2.])

    Paper: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems (2018);
    Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes (2019).
    """

    block_numel: int = 2048

    bits: ClassVar[int] = 1

    @property
    def contraction(self) -> float:
        """Nearly ``1 / block_numel``, where one element is all there is; about 2 / 3 where elements are alike."""
        return (1.0 - _ROUNDED**2) / self.block_numel

    def number_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """``bfloat16``: a magnitude that is off by a 256th changes next to nothing, and has half the bytes."""
        return torch.float64 if dtype == torch.float64 else torch.bfloat16

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        for rows, magnitudes, packed in self._pieces(flat, *self._split(out, Metadata.of(flat))):
            exact = rows.to(packing.exact_dtype(rows.dtype), copy=True)
            magnitudes.copy_(exact.abs_().mean(dim=1, keepdim=True))
            magnitudes.masked_fill_(magnitudes.isinf(), torch.nan)
            packed.copy_(_pack_signs(rows))

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        dtype = packing.exact_dtype(metadata.dtype)
        for rows, magnitudes, packed in self._pieces(out, *self._split(data, metadata)):
            exact = magnitudes.to(dtype)
            if rows.dtype == dtype and rows.shape[1] % 8 == 0 and not add:  # A pass less over the memory.
                _unpack_signs(packed, dtype, out=rows.view(-1, 8))
                rows.mul_(exact)
            else:
                signs = _unpack_signs(packed, dtype).view(len(rows), -1)[:, : rows.shape[1]]
                store(signs.mul_(exact), rows, add)


def _pack_signs(rows: torch.Tensor) -> torch.Tensor:
    """Eight sign bits in a byte, the first element's lowest, 1 for negative ones."""
    bits = rows.itemsize * 8
    signs = rows.view(_INTEGERS[rows.itemsize]).bitwise_right_shift(bits - 1).to(torch.uint8)
    if signs.shape[1] % 8:
        signs = torch.nn.functional.pad(signs, (0, -signs.shape[1] % 8))
    eights = signs.view(torch.int64).bitwise_and_(_ONE_BIT_OF_EACH_BYTE).mul_(_ADD_BYTES_INTO_HIGHEST)
    return eights.bitwise_right_shift_(56)


def _unpack_signs(packed: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """Plus and minus ones: a row of 8 for each byte."""
    return torch.index_select(_signs_of_bytes(dtype, packed.device), 0, packed.reshape(-1).int(), out=out)


@functools.lru_cache(maxsize=8)
def _signs_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor([[-1 if byte >> bit & 1 else 1 for bit in range(8)] for byte in range(256)]).to(device, dtype)
