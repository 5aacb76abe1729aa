"""The largest elements of all, or of each block, with their positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bagua.checks import check_choice, check_numbers, check_whole, unusable
from bagua.compression import packing
from bagua.compression.codec import Codec, Metadata, align

__all__ = ["BlockTopK", "TopK"]

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


_LARGEST_BYTE = 127


class _Values(NamedTuple):
    """How kept values are written.

    Attributes:
        bits: number of bits of each value.
        scales: numbers that the values of a block have in common; None for one for each value: itself.
        encode: fills the scales of rows of values, and returns rows of bytes.
        decode: makes rows of values of rows of bytes and scales.
    """

    bits: int
    scales: int | None
    encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _to_themselves(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    scales.copy_(values)
    return torch.empty(len(values), 0, dtype=torch.uint8, device=values.device)


def _to_bytes(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    steps = values.abs().amax(dim=1, keepdim=True).to(scales.dtype).div_(_LARGEST_BYTE)
    scales.copy_(steps.where(steps < torch.inf, torch.nan))
    multiples = values.to(scales.dtype).div(steps.where(steps > 0, 1)).nan_to_num_(0.0, 0.0, 0.0).round_()
    return multiples.clamp_(-_LARGEST_BYTE, _LARGEST_BYTE).to(torch.int8).view(torch.uint8)


def _from_bytes(coded: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return coded.contiguous().view(torch.int8).to(scales.dtype).mul_(scales)


def _to_two_bits(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    sizes = values.to(scales.dtype).abs()
    high = sizes > sizes.mean(dim=1, keepdim=True)
    for column, chosen in enumerate((~high, high)):
        total = sizes.where(chosen, 0).sum(dim=1)
        scales[:, column] = total / chosen.sum(dim=1).clamp_(min=1)
    finite = sizes.sum(dim=1, keepdim=True) < torch.inf
    scales.copy_(scales.where(finite, torch.nan))
    return packing.pack_codes((values < 0).to(torch.uint8).mul_(2).add_(high), 2)


def _from_two_bits(coded: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes = packing.unpack_codes(coded, 2)
    sizes = torch.where(codes.bitwise_and(1) > 0, scales[:, 1:], scales[:, :1])
    return torch.where(codes > 1, -sizes, sizes)


#: By the number of bits that users name.
_VALUES: dict[int | None, _Values] = {
    8: _Values(8, 1, _to_bytes, _from_bytes),
    2: _Values(2, 2, _to_two_bits, _from_two_bits),
    None: _Values(0, None, _to_themselves, lambda _, scales: scales),
}


class _Sizes(NamedTuple):
    """Of a block of some length: elements that are kept, numbers that they have in common, and bytes."""

    kept: int
    scales: int
    position_bytes: int
    value_bytes: int


@dataclass(frozen=True)
class BlockTopK(Codec):
    """The ``kept`` elements of largest magnitude of each block; zero elsewhere.

    A position takes ``log2(block_numel)`` bits, 12 at the default. With the defaults 4,096 elements of float32 become
    84 bytes: a 195th. The error of a block is at most ``(1 - contraction) ||x||^2``, so this is for exchanges with
    error feedback. A block with a NaN or Inf keeps NaN in the places of its largest elements.

    Args:
        block_numel: elements among which the largest are chosen, a multiple of 8; of a last block that is shorter, the
            same part is kept, rounded up.
        kept: how many, at least 1.
        value_bits: 8: a 127th of the largest value of the block, rounded to the nearest. 2: the sign, and whether the
            magnitude is above the mean; each of the two kinds gets its mean magnitude. None: the values as they are.

    Raises:
        ConfigurationError: an option that cannot be used.

    Example:
        >>> codec, tensor = BlockTopK(block_numel=8, kept=2), torch.tensor([1.0, -4.0, 0.0, 2.0])
        >>> codec.decompress(codec.compress(tensor), Metadata.of(tensor))
        tensor([ 0., -4.,  0.,  0.])

    Paper: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025.
    """

    block_numel: int = 4096
    kept: int = 32
    value_bits: int | None = 8

    def __post_init__(self) -> None:
        packing.check_block_numel(self.block_numel, multiple_of=8)
        check_whole(1, kept=self.kept)
        check_choice((8, 2, None), value_bits=self.value_bits)
        if self.kept > self.block_numel:
            raise unusable("kept", f"at most block_numel, which is {self.block_numel}", self.kept)

    @property
    def contraction(self) -> float:
        """The part of the elements that is kept, where they are alike; less what their values lose in turn."""
        if self.value_bits == 2:
            return 1 / self.block_numel
        lost = 0.0 if self.value_bits is None else self.kept / (2 * _LARGEST_BYTE) ** 2
        return self.kept / self.block_numel * max(0.0, 1 - lost)

    def _sizes(self, length: int) -> _Sizes:
        kept, values = math.ceil(self.kept * length / self.block_numel), _VALUES[self.value_bits]
        scales = kept if values.scales is None else values.scales
        return _Sizes(kept, scales, -(-kept * packing.bits_for(length) // 8), -(-kept * values.bits // 8))

    def _scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.value_bits is None else packing.exact_dtype(dtype)

    def _scale_bytes(self, metadata: Metadata) -> int:
        """Bytes of what comes first: the scales of all blocks."""
        groups = packing.in_rows(metadata.numel, self.block_numel)
        scales = sum((blocks.stop - blocks.start) * self._sizes(length).scales for blocks, _, length in groups)
        return align(scales * self._scale_dtype(metadata.dtype).itemsize)

    def _payload_bytes(self, metadata: Metadata) -> int:
        rows = 0
        for blocks, _, length in packing.in_rows(metadata.numel, self.block_numel):
            sizes = self._sizes(length)
            rows += (blocks.stop - blocks.start) * (sizes.position_bytes + sizes.value_bytes)
        return self._scale_bytes(metadata) + rows

    def _groups(self, flat: torch.Tensor, data: torch.Tensor, metadata: Metadata) -> Iterator[tuple[torch.Tensor, ...]]:
        """A few rows of elements at a time, with their scales and bytes: views of ``flat`` and ``data``."""
        start = self._scale_bytes(metadata)
        scales, coded = data[:start].view(self._scale_dtype(metadata.dtype)), data[start:]
        for blocks, part, length in packing.in_rows(metadata.numel, self.block_numel):
            count, sizes = blocks.stop - blocks.start, self._sizes(length)
            row_bytes = sizes.position_bytes + sizes.value_bytes
            own, scales = scales[: count * sizes.scales], scales[count * sizes.scales :]
            mine, coded = coded[: count * row_bytes], coded[count * row_bytes :]
            rows = flat[part].view(count, length)
            yield from packing.in_pieces(rows, own.view(count, -1), mine.view(count, row_bytes))

    def _encode(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        metadata, values = Metadata.of(flat), _VALUES[self.value_bits]
        out[: self._scale_bytes(metadata)].zero_()  # What is between scales and positions, too.
        for rows, scales, coded in self._groups(flat, out, metadata):
            sizes = self._sizes(rows.shape[1])
            positions = rows.abs().topk(sizes.kept, dim=1, sorted=False).indices.sort(dim=1).values
            coded[:, : sizes.position_bytes] = packing.pack_bits(positions, packing.bits_for(rows.shape[1]))
            coded[:, sizes.position_bytes :] = values.encode(rows.gather(1, positions), scales)

    def _decode(self, data: torch.Tensor, metadata: Metadata, out: torch.Tensor, add: bool) -> None:
        values = _VALUES[self.value_bits]
        if not add:
            out.zero_()
        for rows, scales, coded in self._groups(out, data, metadata):
            sizes = self._sizes(rows.shape[1])
            positions = packing.unpack_bits(
                coded[:, : sizes.position_bytes], packing.bits_for(rows.shape[1]), sizes.kept
            )
            decoded = values.decode(coded[:, sizes.position_bytes :], scales)[:, : sizes.kept]
            rows.scatter_add_(1, positions, decoded.to(rows.dtype))
