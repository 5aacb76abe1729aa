"""Another codec for small tensors than for large ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bagua.checks import check_whole
from bagua.compression.casting import Identity
from bagua.compression.codec import Codec, Metadata, check_codec
from bagua.compression.minmax_uint8 import MinMaxUInt8


@dataclass(frozen=True)
class BySize(Codec):
    """``small`` for tensors below a size, ``large`` for the others; it promises what the chosen one does.

    Small tensors are often the sensitive ones (biases, norms), and compressing them saves nothing.

    Args:
        threshold_bytes: size from which on a tensor is large, uncompressed.
        small: a codec.
        large: a codec.

    Raises:
        ConfigurationError: an argument that cannot be used.

    Example:
        >>> codec = BySize(threshold_bytes=1000)
        >>> [codec.compressed_bytes(Metadata(numel, torch.float32)) for numel in (200, 400)]
        [800, 408]
    """

    threshold_bytes: int = 65536
    small: Codec = field(default_factory=Identity)
    large: Codec = field(default_factory=MinMaxUInt8)

    def __post_init__(self) -> None:
        check_whole(0, threshold_bytes=self.threshold_bytes)
        for name, codec in (("small", self.small), ("large", self.large)):
            check_codec(codec, name)

    @property
    def exact(self) -> bool:
        """Whether both codecs are."""
        return self.small.exact and self.large.exact

    @property
    def unbiased(self) -> bool:
        """Whether both codecs are."""
        return self.small.unbiased and self.large.unbiased

    def for_draw(self, *numbers: int) -> Codec:
        """Both codecs with random numbers of their own."""
        return BySize(self.threshold_bytes, self.small.for_draw(*numbers), self.large.for_draw(*numbers))

    @property
    def contraction(self) -> float | None:
        """That of the codec that loses more."""
        small, large = self.small.contraction, self.large.contraction
        return None if small is None or large is None else min(small, large)

    def choose(self, metadata: Metadata) -> Codec:
        """The codec for such a tensor."""
        nbytes = metadata.numel * metadata.dtype.itemsize
        return self.small if nbytes < self.threshold_bytes else self.large

    def compressed_bytes(self, metadata: Metadata) -> int:
        return self.choose(metadata).compressed_bytes(metadata)

    def _payload_bytes(self, metadata: Metadata) -> int:
        return self.compressed_bytes(metadata)

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        self.choose(Metadata.of(flat)).compress(flat, out=out)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        self.choose(metadata).decompress(data, metadata, out=out, add=add)
