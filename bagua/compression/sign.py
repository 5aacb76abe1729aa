"""One bit for each element: its sign; one magnitude for each block."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.compression.codec import Metadata, exact_dtype, store
from bagua.compression.packing import CodedBlocks

#: Eight bytes of 0 or 255, as one integer, become one byte: keep another bit of each, and add them up in the highest.
_ONE_BIT_OF_EACH_BYTE = int.from_bytes(bytes(1 << bit for bit in range(8)), "little", signed=True)
_ADD_BYTES_INTO_HIGHEST = 0x0101010101010101

#: How far a number is off, at most, when it is rounded to bfloat16.
_ROUNDED = 2.0**-8

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Sign(CodedBlocks):
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
        for rows, magnitudes, packed in self._groups(flat, out, Metadata.of(flat)):
            magnitudes.copy_(_mean_magnitude(rows))
            magnitudes.masked_fill_(magnitudes.isinf(), torch.nan)
            packed.copy_(_pack_signs(rows))

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        dtype = exact_dtype(metadata.dtype)
        for rows, magnitudes, packed in self._groups(out, data, metadata):
            exact = magnitudes.to(dtype)
            if rows.dtype == dtype and rows.shape[1] % 8 == 0 and not add:  # A pass less over the memory.
                _unpack_signs(packed, dtype, out=rows.view(-1, 8))
                rows.mul_(exact)
            else:
                signs = _unpack_signs(packed, dtype).view(len(rows), -1)[:, : rows.shape[1]]
                store(signs.mul_(exact), rows, add)


def _mean_magnitude(rows: torch.Tensor) -> torch.Tensor:
    """The mean of the magnitudes in each row; not finite if one of them, or their sum, is not."""
    return rows.to(exact_dtype(rows.dtype), copy=True).abs_().mean(dim=1, keepdim=True)


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
