"""Four bits for each element: a sign, and which power of two of the largest in its block."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.compression.base import Metadata, store
from bagua.compression.coded_blocks import CodedBlocks
from bagua.compression.packing.bits import pack_codes

#: Exponent of the smallest power of two, and where a float32 has its exponent, and what was added to it.
_SMALLEST = -6
_EXPONENT_BITS, _EXPONENT_BIAS = 23, 127
#: What lies in the middle of two powers of two becomes a power of two itself.
_MIDDLE = 4 / 3


@dataclass(frozen=True)
class E3M0(CodedBlocks):
    """Four bits for each element, as a floating-point number of three bits of exponent and none of mantissa (FP4).

    With ``s`` the largest magnitude of a block, an element becomes the nearest of 0 and plus or minus ``2 ** k * s``,
    for ``k`` from -6 to 0: ``|x' - x| <= |x| / 3`` where ``|x| >= s / 64``, and at most ``s / 128`` below. Zero stays
    zero, and the largest element stays itself. A block with a NaN or Inf becomes NaN as a whole.

    Args:
        block_numel: elements that share a magnitude, a multiple of 8; the last block may have fewer. Each block costs
            4 bytes (8 in float64).

    Raises:
        ConfigurationError: ``block_numel`` is no positive multiple of 8.

    Example:
        >>> codec, tensor = E3M0(), torch.tensor([1.0, -0.4, 0.2, 0.001])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([ 1.0000, -0.5000,  0.2500,  0.0000])

    Paper: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025.
    """

    block_numel: int = 256

    bits: ClassVar[int] = 4

    @property
    def contraction(self) -> float:
        """A third of each element is lost at most, and a 128th of the largest of each that is small."""
        return max(0.0, 8 / 9 - self.block_numel / 128**2)

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        for rows, scales, packed in self._groups(flat, out, Metadata.of(flat)):
            largest = torch.maximum(rows.amax(dim=1, keepdim=True), rows.amin(dim=1, keepdim=True).neg_())
            scales.copy_(largest.where(largest < torch.inf, torch.nan))
            packed.copy_(pack_codes(_codes(rows.to(scales.dtype), scales), self.bits))

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        for rows, scales, packed in self._groups(out, data, metadata):
            pairs = _values_of_bytes(scales.dtype, scales.device).index_select(0, packed.reshape(-1).int())
            store(pairs.view(len(rows), -1)[:, : rows.shape[1]].mul_(scales), rows, add)


def _codes(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Sign and exponent of each element as ``uint8``."""
    shares = rows.div(scales.where(scales > 0, 1)).float()
    bits = shares.view(torch.int32)
    signs = bits.bitwise_right_shift(31).bitwise_and_(8)
    shares = shares.abs().mul_(_MIDDLE)
    levels = shares.view(torch.int32) >> _EXPONENT_BITS
    levels.sub_(_EXPONENT_BIAS + _SMALLEST - 1).clamp_(0, 1 - _SMALLEST)
    # Half of the smallest power is nearer to it than to zero, and has the exponent of zero.
    torch.maximum(levels, shares >= _MIDDLE * 2.0 ** (_SMALLEST - 1), out=levels)
    return levels.bitwise_or_(signs).to(torch.uint8)


@functools.lru_cache(maxsize=8)
def _values_of_bytes(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The two values in each byte, in parts of the largest."""
    values = [0.0, *(2.0 ** (_SMALLEST + level) for level in range(1 - _SMALLEST))]
    values += [-value for value in values]
    return torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)]).to(device, dtype)
