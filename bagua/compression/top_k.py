"""The largest elements, with their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bagua.checks import check_numbers
from bagua.compression.codec import Codec, Metadata, align

#: Elements that are looked at to guess how large the largest are, and by how much more are then taken.
_SAMPLE_NUMEL = 2**16
_MARGIN = 1.2


@dataclass(frozen=True)
class TopK(Codec):
    """The elements of largest magnitude with their positions: ``x' = x`` there, and zero elsewhere.

    The error is at most ``||x' - x||^2 <= (1 - ratio) ||x||^2``, so this is for exchanges with error
    feedback. NaN and Inf count as largest; some of them are always kept. Among equal elements the
    choice is the same whenever the input is.

    Args:
        ratio: part of the elements that is kept, above 0 and at most 1; at least one element is.

    Raises:
        ConfigurationError: ``ratio`` is not in that range.

    Example:
        >>> codec, tensor = TopK(ratio=0.5), torch.tensor([1.0, -4.0, 0.0, 2.0])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([ 0., -4.,  0.,  2.])

    Paper: Stich et al., Sparsified SGD with Memory (2018).
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        check_numbers(lambda ratio: 0 < ratio <= 1, "a number above 0 and at most 1", ratio=self.ratio)

    @property
    def contraction(self) -> float:
        """``ratio``, where elements are alike."""
        return self.ratio

    def kept(self, metadata: Metadata) -> int:
        """How many elements are kept."""
        return min(math.ceil(self.ratio * metadata.numel), metadata.numel)

    def _payload_bytes(self, metadata: Metadata) -> int:
        kept = self.kept(metadata)
        return align(kept * _position_dtype(metadata.numel).itemsize) + kept * metadata.dtype.itemsize

    def _split(self, data: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and values: views of ``data``."""
        kept, dtype = self.kept(metadata), _position_dtype(metadata.numel)
        start = align(kept * dtype.itemsize)
        values = data[start : start + kept * metadata.dtype.itemsize].view(metadata.dtype)
        return data[: kept * dtype.itemsize].view(dtype), values

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        metadata = Metadata.of(flat)
        out.zero_()  # What is between positions and values, too.
        positions, values = self._split(out, metadata)
        largest = _largest(flat.abs(), self.kept(metadata)).sort().values
        positions.copy_(largest)
        torch.index_select(flat, 0, largest, out=values)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        positions, values = self._split(data, metadata)
        if not add:
            out.zero_()
        out.index_add_(0, positions, values.to(out.dtype))


def _position_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel < 2**31 else torch.int64


def _largest(magnitudes: torch.Tensor, kept: int) -> torch.Tensor:
    """Positions of the ``kept`` largest elements, in no order."""
    stride = magnitudes.numel() // _SAMPLE_NUMEL
    if stride < 2 or kept * 4 > magnitudes.numel() or magnitudes.device.type != "cpu":
        return magnitudes.topk(kept, sorted=False).indices
    # Three times as fast: a threshold from a sample leaves few candidates. Should it be too high, nothing is lost.
    sample = magnitudes[::stride]
    wanted = min(math.ceil(kept / magnitudes.numel() * len(sample) * _MARGIN) + 32, len(sample))
    threshold = sample.topk(wanted, sorted=False).values.min()
    candidates = (~(magnitudes < threshold)).nonzero().view(-1)  # NaN is not less.
    if len(candidates) < kept:
        return magnitudes.topk(kept, sorted=False).indices
    return candidates[magnitudes[candidates].topk(kept, sorted=False).indices]
