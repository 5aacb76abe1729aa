"""The largest coefficients of a cosine transform of each block."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from bagua.checks import check_whole, unusable
from bagua.compression.base import Codec, Metadata, exact_dtype, store
from bagua.compression.block_top_k import BlockTopK
from bagua.compression.packing.blocks import in_pieces


def check_side(side: int) -> None:
    """Raise ``ConfigurationError`` unless a row of a block can have so many elements."""
    check_whole(1, side=side)
    if side % 4:
        raise unusable("side", "a multiple of 4", side)


@functools.lru_cache(maxsize=8)
def _basis(side: int, device: torch.device) -> torch.Tensor:
    """The orthonormal cosine transform (DCT-II) of ``side`` numbers, a row for each coefficient.

    In double precision, in which products are never computed with fewer bits: autocast, TF32 and what users else allow
    their own products in single precision would leave a transform that is not orthonormal.
    """
    order = torch.arange(side, dtype=torch.float64)
    basis = torch.cos(math.pi / side * torch.outer(order, order + 0.5)) * math.sqrt(2 / side)
    basis[0] = math.sqrt(1 / side)
    return basis.to(device)


def to_coefficients(flat: torch.Tensor, side: int) -> torch.Tensor:
    """The coefficients of blocks of ``side`` x ``side`` elements; the last block is filled up with zeros.

    Args:
        flat: one-dimensional, floating-point.
        side: length of a row of a block.

    Returns:
        One-dimensional, in single precision at least, a multiple of ``side ** 2`` elements. Of the same length as a
        vector, because the transform is orthonormal.

    Example:
        >>> to_coefficients(torch.ones(4), 2).round(decimals=3)
        tensor([2., 0., 0., 0.])
    """
    basis, block = _basis(side, flat.device), side**2
    missing = -flat.numel() % block
    coefficients = flat.new_empty(flat.numel() + missing, dtype=exact_dtype(flat.dtype))
    whole = flat.numel() // block * block
    _turn(flat[:whole], coefficients[:whole], basis, basis.t())
    if missing:
        _turn(torch.nn.functional.pad(flat[whole:], (0, missing)), coefficients[whole:], basis, basis.t())
    return coefficients


def from_coefficients(coefficients: torch.Tensor, side: int, numel: int) -> torch.Tensor:
    """The first ``numel`` elements of what ``to_coefficients`` was given.

    Example:
        >>> from_coefficients(torch.tensor([2.0, 0.0, 0.0, 0.0]), 2, 3).round(decimals=3)
        tensor([1., 1., 1.])
    """
    basis = _basis(side, coefficients.device)
    flat = torch.empty_like(coefficients)
    _turn(coefficients, flat, basis.t(), basis)
    return flat[:numel]


def _turn(flat: torch.Tensor, out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Multiply each block from both sides, so few at a time that they stay in the cache."""
    side = len(left)
    for rows, turned in in_pieces(flat.view(-1, side**2), out.view(-1, side**2)):
        blocks = rows.double().view(-1, side, side)
        turned.copy_((left @ blocks @ right).view(-1, side**2))


@dataclass(frozen=True)
class DCTTopK(Codec):
    """The ``kept`` largest coefficients of an orthonormal cosine transform of each block; the others become zero.

    Blocks are ``side`` x ``side`` elements that follow each other. Few coefficients tell what is smooth over
    neighbours; of what is not, they keep as much as elements would: ``||x' - x||^2 <= (1 - contraction) ||x||^2``
    either way. For exchanges with error feedback. A block with a NaN or Inf becomes NaN as a whole.

    Args:
        side: side of a block, a multiple of 4.
        kept: coefficients of a block, at least 1.
        value_bits: 8, 2, or None for coefficients in single precision; see ``BlockTopK``.

    Raises:
        ConfigurationError: an option that cannot be used.

    Example:
        >>> codec, tensor = DCTTopK(side=4, kept=1, value_bits=None), torch.full((16,), 3.0)
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))[:4]
        tensor([3., 3., 3., 3.])

    Paper: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024.
    """

    side: int = 64
    kept: int = 32
    value_bits: int | None = 8

    def __post_init__(self) -> None:
        check_side(self.side)
        _ = self.coefficients

    @property
    def coefficients(self) -> BlockTopK:
        """The codec of the coefficients."""
        return BlockTopK(self.side**2, self.kept, self.value_bits)

    @property
    def contraction(self) -> float:
        """That of the codec of the coefficients."""
        return self.coefficients.contraction

    def _transformed(self, metadata: Metadata) -> Metadata:
        block = self.side**2
        return Metadata(-(-metadata.numel // block) * block, exact_dtype(metadata.dtype))

    def _payload_bytes(self, metadata: Metadata) -> int:
        return self.coefficients.compressed_bytes(self._transformed(metadata))

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        self.coefficients.compress(to_coefficients(flat, self.side), out=out)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        found = self.coefficients.decompress(data, self._transformed(metadata))
        store(from_coefficients(found, self.side, metadata.numel), out, add)
