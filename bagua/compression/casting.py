"""All bytes of each element, or two of them: another floating-point dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.compression.codec import FLOATING, Codec, Metadata, store

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class _Cast(Codec):
    target: ClassVar[torch.dtype]

    @property
    def contraction(self) -> float:
        """Nearly all: what is left of rounding each element."""
        return 1.0 - float(torch.finfo(self.target).eps) ** 2

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:  # noqa: ARG002 - for what is stored as it is
        return self.target

    def _payload_bytes(self, metadata: Metadata) -> int:
        return metadata.numel * self._stored_as(metadata.dtype).itemsize

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out[: self._payload_bytes(Metadata.of(flat))].view(self._stored_as(flat.dtype)).copy_(flat)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        store(data[: self._payload_bytes(metadata)].view(self._stored_as(metadata.dtype)), out, add)


@dataclass(frozen=True)
class Identity(_Cast):
    """The bytes of the tensor as they are: ``x' = x``, bit by bit. Takes complex numbers and integers, too.

    Example:
        >>> Identity().compressed_bytes(Metadata(10, torch.float32))
        40
    """

    dtypes = (*FLOATING, torch.complex64, torch.complex128, *_INTEGERS, torch.bool)
    unbiased = True
    contraction = 1.0  # Nothing is lost.

    def _stored_as(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


@dataclass(frozen=True)
class Float16(_Cast):
    """IEEE half precision: ``|x' - x| <= 2**-11 |x|`` where ``2**-14 <= |x| <= 65504``.

    Below, it loses ``2**-25`` at most; above, values become infinite, so that a
    ``GradScaler`` sees it and scales less. Zero, NaN and Inf are reproduced exactly.

    Example:
        >>> codec, tensor = Float16(), torch.tensor([1.0, 1e6])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([1., inf])
    """

    target = torch.float16


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Brain floating point: ``|x' - x| <= 2**-8 |x|`` over the range of float32.

    Zero, NaN and Inf are reproduced exactly. Values beyond that range become infinite, and
    below ``1e-38`` the error is absolute.

    Example:
        >>> codec, tensor = BFloat16(), torch.tensor([1.0, 1e6])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([1.0000e+00, 9.9942e+05])
    """

    target = torch.bfloat16
