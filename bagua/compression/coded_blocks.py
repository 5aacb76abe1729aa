"""Codecs that keep some numbers of each block, and a code of a few bits for each element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from bagua.compression.codec import Codec, Metadata, exact_dtype
from bagua.compression.packing import check_block_numel, in_pieces, in_rows


class CodedBlocks(Codec):
    """A codec whose bytes are the numbers of all blocks, and then the codes of all elements.

    Attributes:
        block_numel: elements of a block, a multiple of 8, so that the codes of each block begin with a byte.
        bits: bits of a code.
        times_cached: elements that a CPU compresses together, over those that stay in its cache.
    """

    block_numel: int
    bits: ClassVar[int]
    times_cached: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_block_numel(self.block_numel, multiple_of=8)

    @property
    def numbers_per_block(self) -> int:
        """Numbers that are kept of each block."""
        return 1

    def number_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of these numbers, of elements of ``dtype``."""
        return exact_dtype(dtype)

    def _header_bytes(self, metadata: Metadata) -> int:
        blocks = -(-metadata.numel // self.block_numel)
        return blocks * self.numbers_per_block * self.number_dtype(metadata.dtype).itemsize

    def _payload_bytes(self, metadata: Metadata) -> int:
        return self._header_bytes(metadata) + -(-metadata.numel * self.bits // 8)

    def _groups(self, flat: torch.Tensor, data: torch.Tensor, metadata: Metadata) -> Iterator[tuple[torch.Tensor, ...]]:
        """A few blocks at a time, one in each row: elements, numbers, and packed codes; views of ``flat`` and ``data``.

        Args:
            flat: elements, to be read or written.
            data: compressed bytes, to be written or read.
            metadata: facts about ``flat``.
        """
        start = self._header_bytes(metadata)
        header = data[:start].view(self.number_dtype(metadata.dtype)).view(-1, self.numbers_per_block)
        packed = data[start : self._payload_bytes(metadata)]
        for blocks, part, length in in_rows(metadata.numel, self.block_numel):
            rows = flat[part].view(-1, length)
            codes = packed[part.start * self.bits // 8 : -(-part.stop * self.bits // 8)].view(len(rows), -1)
            yield from in_pieces(rows, header[blocks], codes, times=self.times_cached)
