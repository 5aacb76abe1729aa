"""No compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from bagua.compression.base import FLOATING, Codec, Metadata, store


@dataclass(frozen=True)
class Identity(Codec):
    """The bytes of the tensor as they are: ``x' = x``, bit by bit. Takes complex numbers and integers, too.

    Example:
        >>> Identity().compressed_bytes(Metadata(10, torch.float32))
        40
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (
        *FLOATING,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )

    @property
    def exact(self) -> bool:
        """Nothing is lost."""
        return True

    @property
    def contraction(self) -> float:
        """All of it."""
        return 1.0

    def _payload_bytes(self, metadata: Metadata) -> int:
        return metadata.numel * metadata.dtype.itemsize

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        out[: flat.nbytes].view(flat.dtype).copy_(flat)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        store(data[: self._payload_bytes(metadata)].view(metadata.dtype), out, add)
