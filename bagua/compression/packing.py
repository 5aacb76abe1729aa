"""Small whole numbers side by side in bytes, work in few rows of blocks at a time, and noise for rounding.

Then codecs that keep some numbers of each block, and a code of a few bits for each element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch

from bagua.checks import check_kind, check_whole, unusable
from bagua.compression.codec import Codec, Metadata

#: So many codes of a width as there are in a byte, as one integer, and what keeps each of them apart.
_WORDS = {4: torch.int16, 2: torch.int32}
_APART = {4: 0x0F0F, 2: 0x03030303}


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of ``uint8`` below ``2 ** bits``, 4 or 2 bits each, in rows of bytes; the first code is in the lowest bits.

    Example:
        >>> pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4).tolist()
        [[33, 3]]
    """
    short = -codes.shape[1] % (8 // bits)
    if short:
        codes = torch.nn.functional.pad(codes, (0, short))
    words = codes.view(_WORDS[bits])
    packed = words.clone()
    for place in range(1, 8 // bits):
        packed |= words >> place * (8 - bits)
    return packed.bitwise_and_(0xFF).to(torch.uint8)


def unpack_codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The rows that ``pack_codes`` was given, up to seven zeros longer."""
    words = packed.to(_WORDS[bits])
    spread = words.clone()
    for place in range(1, 8 // bits):
        spread |= words << place * (8 - bits)
    return spread.bitwise_and_(_APART[bits]).view(torch.uint8)


def bits_for(count: int) -> int:
    """Bits that tell ``count`` things apart.

    Example:
        >>> bits_for(4096), bits_for(1), bits_for(5)
        (12, 0, 3)
    """
    return (count - 1).bit_length()


def pack_bits(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of ``int64`` below ``2 ** bits`` in rows of bytes, the lowest bit first.

    Example:
        >>> pack_bits(torch.tensor([[5, 1]]), 3).tolist()
        [[13]]
    """
    places = torch.arange(bits, device=numbers.device)
    ones = (numbers.unsqueeze(-1) >> places).bitwise_and_(1).view(len(numbers), -1)
    eights = torch.nn.functional.pad(ones, (0, -ones.shape[1] % 8)).view(len(numbers), -1, 8)
    return (eights << torch.arange(8, device=numbers.device)).sum(dim=-1).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """``count`` numbers of each row that ``pack_bits`` made."""
    ones = (packed.long().unsqueeze(-1) >> torch.arange(8, device=packed.device)).bitwise_and_(1)
    numbers = ones.view(len(packed), -1)[:, : count * bits].reshape(len(packed), count, bits)
    return (numbers << torch.arange(bits, device=packed.device)).sum(dim=-1)


#: What stays in the cache of one core, with a copy: 512 KiB of float32.
_CACHED_NUMEL = 2**17


def check_block_numel(block_numel: int, multiple_of: int = 1) -> None:
    """Raise ``ConfigurationError`` unless a block can have so many elements."""
    check_whole(1, block_numel=block_numel)
    if block_numel % multiple_of:
        raise unusable("block_numel", f"a positive multiple of {multiple_of}", block_numel)


def in_rows(numel: int, block_numel: int) -> list[tuple[slice, slice, int]]:
    """Blocks, their elements, and the length of each: first the whole blocks, then the one that is not.

    Example:
        >>> in_rows(7, 3)
        [(slice(0, 2, None), slice(0, 6, None), 3), (slice(2, 3, None), slice(6, 7, None), 1)]
    """
    whole = numel // block_numel
    cut = whole * block_numel
    found = [(slice(0, whole), slice(0, cut), block_numel)] if whole else []
    if cut < numel:
        found.append((slice(whole, whole + 1), slice(cut, numel), numel - cut))
    return found


def in_pieces(rows: torch.Tensor, *others: torch.Tensor, times: int = 1) -> Iterable[tuple[torch.Tensor, ...]]:
    """A few rows at a time, with the same rows of ``others``; ``times`` as many as stay in the cache."""
    # Other devices have other caches, and each operation costs its start.
    few = max(times * _CACHED_NUMEL // rows.shape[1], 1) if rows.device.type == "cpu" else len(rows)
    if len(rows) <= few:
        return ((rows, *others),)
    return zip(*(torch.split(tensor, few) for tensor in (rows, *others)), strict=True)


_BITS = 64
_MASK = 2**_BITS - 1
#: Sixteen random bits are enough: what they miss is a 131072nd part of a step.
_PER_DRAW = 4
_SPAN = 2**16


def mixed_seed(*numbers: int) -> int:
    """One seed made of several numbers, which differs if one of them does.

    Example:
        >>> mixed_seed(0, 1) != mixed_seed(1, 0)
        True

    Source: the finalizer of Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed >> 1


def noise_like(rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers above 0 and below 1, all equally likely: single precision, in the shape of ``rows``."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    drawn = torch.empty(-(-rows.numel() // _PER_DRAW), dtype=torch.int64, device=rows.device)
    # One draw of 64 bits serves four elements, which takes a third of the time.
    drawn.random_(-(2**63), None, generator=generator)
    noise = drawn.view(torch.int16)[: rows.numel()].float()
    return noise.add_(_SPAN / 2 + 0.5).div_(_SPAN).view(rows.shape)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of what blocks of ``dtype`` have in common: at least single precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class CodedBlocks(Codec):
    """A codec whose bytes are the numbers of all blocks, and then the codes of all elements.

    Attributes:
        block_numel: elements of a block, a multiple of 8 unless codes are bytes: those of each block begin with one.
        bits: bits of a code.
        numbers_per_block: numbers that are kept of each block.
        times_cached: elements that a CPU compresses together, over those that stay in its cache.
    """

    block_numel: int
    bits: ClassVar[int]
    numbers_per_block: ClassVar[int] = 1
    times_cached: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_block_numel(self.block_numel, multiple_of=1 if self.bits == 8 else 8)

    def number_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of these numbers, of elements of ``dtype``."""
        return exact_dtype(dtype)

    def _header_bytes(self, metadata: Metadata) -> int:
        blocks = -(-metadata.numel // self.block_numel)
        return blocks * self.numbers_per_block * self.number_dtype(metadata.dtype).itemsize

    def _payload_bytes(self, metadata: Metadata) -> int:
        return self._header_bytes(metadata) + -(-metadata.numel * self.bits // 8)

    def _split(self, data: torch.Tensor, metadata: Metadata) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers, a row for each block, and packed codes with what is behind them: views of ``data``."""
        start = self._header_bytes(metadata)
        numbers = data[:start].view(self.number_dtype(metadata.dtype))
        return numbers.view(-1, self.numbers_per_block), data[start:]

    def _pieces(
        self, flat: torch.Tensor, numbers: torch.Tensor, packed: torch.Tensor
    ) -> list[tuple[torch.Tensor, ...]]:
        """A few blocks at a time, one in each row: elements, numbers, and packed codes; views of what is given.

        Args:
            flat: elements, to be read or written.
            numbers: from ``_split``.
            packed: from ``_split``.
        """
        found: list[tuple[torch.Tensor, ...]] = []
        for blocks, part, length in in_rows(flat.numel(), self.block_numel):
            rows = flat[part].view(-1, length)
            codes = packed[part.start * self.bits // 8 : -(-part.stop * self.bits // 8)].view(len(rows), -1)
            found += in_pieces(rows, numbers[blocks], codes, times=self.times_cached)
        return found


class SeededBlocks(CodedBlocks):
    """Coded blocks whose elements are rounded at random, if there is a seed.

    Attributes:
        seed: seed of random numbers to round with; None: round to the nearest.
    """

    seed: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind((int, type(None)), "a whole number, or None", seed=self.seed)

    @property
    def unbiased(self) -> bool:
        """Whether it rounds at random."""
        return self.seed is not None

    def for_draw(self, *numbers: int) -> Codec:
        """The codec that rounds with other random numbers, if it does so at all."""
        if self.seed is None:
            return self
        return dataclasses.replace(self, seed=mixed_seed(self.seed, *numbers))  # type: ignore[type-var]
