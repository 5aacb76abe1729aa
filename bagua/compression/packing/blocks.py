"""Work in rows of blocks, so few at a time that they stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bagua.checks import check_whole, unusable

#: What stays in the cache of one core, with a copy: 512 KiB of float32.
_CACHED_NUMEL = 2**17


def check_block_numel(block_numel: int, multiple_of: int = 1) -> None:
    """Raise ``ConfigurationError`` unless a block can have so many elements."""
    check_whole(1, block_numel=block_numel)
    if block_numel % multiple_of:
        raise unusable("block_numel", f"a positive multiple of {multiple_of}", block_numel)


def in_rows(numel: int, block_numel: int) -> Iterator[tuple[slice, slice, int]]:
    """Blocks, their elements, and the length of each: first the whole blocks, then the one that is not.

    Example:
        >>> list(in_rows(7, 3))
        [(slice(0, 2, None), slice(0, 6, None), 3), (slice(2, 3, None), slice(6, 7, None), 1)]
    """
    whole = numel // block_numel
    cut = whole * block_numel
    if whole:
        yield slice(0, whole), slice(0, cut), block_numel
    if cut < numel:
        yield slice(whole, whole + 1), slice(cut, numel), numel - cut


def in_pieces(rows: torch.Tensor, *others: torch.Tensor, times: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    """A few rows at a time, with the same rows of ``others``; ``times`` as many as stay in the cache."""
    # Other devices have other caches, and each operation costs its start.
    few = max(times * _CACHED_NUMEL // rows.shape[1], 1) if rows.device.type == "cpu" else len(rows)
    return zip(*(torch.split(tensor, few) for tensor in (rows, *others)), strict=True)
