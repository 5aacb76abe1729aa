"""Four bits for each element: a sign, and which power of two of the largest in its block."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from bagua.compression.base import Codec, Metadata, exact_dtype, store
from bagua.compression.packing.bits import pack_codes
from bagua.compression.packing.blocks import check_block_numel, in_pieces, in_rows

_BITS = 4
#: Exponent of the smallest power of two, and where a float32 has its exponent, and what was added to it.
_SMALLEST = -6
_EXPONENT_BITS, _EXPONENT_BIAS = 23, 127
#: What lies in the middle of two powers of two becomes a power of two itself.
_MIDDLE = 4 / 3


@dataclass(frozen=True)
class E3M0(Codec):
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

    def __post_init__(self) -> None:
        check_block_numel(self.block_numel, multiple_of=8)

    @property
    def contraction(self) -> float:
        """A third of each element is lost at most, and a 128th of the largest of each that is small."""
        return max(0.0, 8 / 9 - self.block_numel / 128**2)

    def _scale_bytes(self, metadata: Metadata) -> int:
        return -(-metadata.numel // self.block_numel) * exact_dtype(metadata.dtype).itemsize

    def _payload_bytes(self, metadata: Metadata) -> int:
        return self._scale_bytes(metadata) + -(-metadata.numel * _BITS // 8)

    def _split(self, data: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Magnitudes, a row for each block, and packed codes: views of ``data``."""
        start = self._scale_bytes(metadata)
        scales = data[:start].view(exact_dtype(metadata.dtype)).view(-1, 1)
        return scales, data[start : self._payload_bytes(metadata)]

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        scales, packed = self._split(out, Metadata.of(flat))
        for blocks, part, length in in_rows(flat.numel(), self.block_numel):
            rows = flat[part].view(-1, length)
            for piece, scale, codes in in_pieces(rows, scales[blocks], _of(part, packed, len(rows))):
                largest = torch.maximum(piece.amax(dim=1, keepdim=True), piece.amin(dim=1, keepdim=True).neg_())
                scale.copy_(largest.where(largest < torch.inf, torch.nan))
                codes.copy_(pack_codes(_codes(piece.to(scale.dtype), scale), _BITS))

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        scales, packed = self._split(data, metadata)
        for blocks, part, length in in_rows(metadata.numel, self.block_numel):
            rows = out[part].view(-1, length)
            for piece, scale, codes in in_pieces(rows, scales[blocks], _of(part, packed, len(rows))):
                pairs = _values_of_bytes(scale.dtype, scale.device).index_select(0, codes.reshape(-1).int())
                store(pairs.view(len(piece), -1)[:, :length].mul_(scale), piece, add)


def _of(part: slice, packed: torch.Tensor, rows: int) -> torch.Tensor:
    return packed[part.start * _BITS // 8 : -(-part.stop * _BITS // 8)].view(rows, -1)


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
