"""One byte for each element, with one range for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua.compression.base import Codec, Metadata, store
from bagua.errors import ConfigurationError

__all__ = ["MinMaxUInt8"]

#: A step that is a little longer than a 255th of the range, and a first code that is a little
#: lower than rounding says: so no rounding error can take a code below 0 or above 255.
_SLACK = 1 + 2.0**-15
_LOWER_BY = 2.0**-8


@dataclass(frozen=True)
class MinMaxUInt8(Codec):
    """One byte for each element: the index of the nearest of 256 equidistant values between the block's extremes.

    With ``low`` and ``high`` the extremes of a block, ``step = (high - low) / 255``, rounded up
    to 16 significant bits, ``x' = first + step * q`` and ``q = round((x - first) / step)``.

    * ``|x' - x| <= (high - low) / 510 * (1 + 1e-4)``, and the rounding of the dtype.
    * Where a block's range contains zero, ``first`` is a multiple of ``step``, so zero
      is reproduced exactly. A block of equal elements is reproduced exactly, too.
    * A block with a NaN or Inf becomes NaN as a whole, so that nobody overlooks it; so does one
      whose range is beyond ``3.4e38`` (in float64 ``1.8e308``). No block becomes infinite.
    * Differences below ``2 ** -126`` (in float64 ``2 ** -1022``) are lost.

    Args:
        block_numel: elements that share a range; the last block may have fewer. Smaller
            blocks are more exact, at 8 bytes each (16 in float64).

    Raises:
        ConfigurationError: ``block_numel`` is no positive integer.

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

    def __post_init__(self) -> None:
        if type(self.block_numel) is not int or self.block_numel < 1:
            raise ConfigurationError(
                "a block must have elements",
                argument="block_numel",
                expected="a positive integer",
                seen=repr(self.block_numel),
            )

    def _header(self, metadata: Metadata) -> tuple[int, torch.dtype]:
        """Number of blocks, and the dtype of their first value and step, which all arithmetic is done in."""
        exact = torch.float64 if metadata.dtype == torch.float64 else torch.float32
        return -(-metadata.numel // self.block_numel), exact

    def _payload_bytes(self, metadata: Metadata) -> int:
        blocks, dtype = self._header(metadata)
        return 2 * blocks * dtype.itemsize + metadata.numel

    def _split(self, data: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """First values, steps and codes: views of ``data``."""
        blocks, dtype = self._header(metadata)
        header, codes = data[: self._payload_bytes(metadata)].split_with_sizes(
            [2 * blocks * dtype.itemsize, metadata.numel]
        )
        first, step = header.view(dtype).view(2, blocks)
        return first, step, codes

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        first, step, codes = self._split(out, Metadata.of(flat))
        whole = flat.numel() // self.block_numel
        cut = whole * self.block_numel
        if whole:
            _encode_blocks(flat[:cut].view(whole, -1), first[:whole], step[:whole], codes[:cut].view(whole, -1))
        if cut < flat.numel():
            _encode_blocks(flat[cut:].view(1, -1), first[whole:], step[whole:], codes[cut:].view(1, -1))

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        first, step, codes = self._split(data, metadata)
        whole = metadata.numel // self.block_numel
        cut = whole * self.block_numel
        for blocks, part in ((slice(0, whole), slice(0, cut)), (slice(whole, None), slice(cut, None))):
            if codes[part].numel():
                rows = len(first[blocks])
                values = codes[part].view(rows, -1) * step[blocks, None] + first[blocks, None]
                limit = torch.finfo(metadata.dtype).max
                store(values.clamp_(-limit, limit).view(-1), out[part], add)


def _encode_blocks(blocks: torch.Tensor, first: torch.Tensor, step: torch.Tensor, codes: torch.Tensor) -> None:
    _set_grid(blocks.amin(dim=1), blocks.amax(dim=1), first, step)
    scaled = (blocks.to(first.dtype) - first[:, None]) * step.reciprocal()[:, None]
    codes.copy_(scaled.round_().nan_to_num_(nan=0.0))


def _set_grid(low: torch.Tensor, high: torch.Tensor, first: torch.Tensor, step: torch.Tensor) -> None:
    """Choose the first value and the step of each block from its extremes."""
    low, high = low.double(), high.double()
    # Divided before subtracted, because the range itself may overflow.
    wanted = high.div(255).sub_(low / 255).mul_(_SLACK).clamp_(min=torch.finfo(step.dtype).tiny)
    mantissa, exponent = torch.frexp(wanted)
    # With 16 significant bits in a step, its multiples up to 255 are exact in float32, with fused additions or without.
    wanted = torch.ldexp(mantissa.mul_(2.0**16).ceil_(), exponent - 16)
    aligned = low.div(wanted).sub_(_LOWER_BY).round_().mul_(wanted)
    # A NaN fails every comparison.
    finite = (low.abs() < torch.inf) & (256 * wanted <= torch.finfo(step.dtype).max)
    contains_zero = (low <= 0) & (high >= 0)
    first.copy_(torch.where(contains_zero, aligned, low).where(finite, torch.nan))
    step.copy_(wanted.where(finite, torch.nan))
