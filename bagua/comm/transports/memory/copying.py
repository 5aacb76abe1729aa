"""Copying: large flat tensors as fast as the memory of the host allows, and results to where they belong."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

#: From here on the C library is as fast as torch while the data is in the cache, and up to 1.8 times as fast when it
#: is not: it does not read what it is about to overwrite. Below, what calling it costs shows.
_LARGE_BYTES = 256 * 1024


def copy_flat(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``; the interpreter is free for other threads meanwhile.

    Args:
        target: contiguous, of as many elements as ``source``.
        source: contiguous, of the dtype and on the device of ``target``.

    Example:
        >>> target = torch.zeros(3)
        >>> copy_flat(target, torch.ones(3))
        >>> target
        tensor([1., 1., 1.])
    """
    nbytes = source.numel() * source.element_size()
    if nbytes < _LARGE_BYTES or not target.is_cpu:
        target.copy_(source)
        return
    assert target.numel() == source.numel()
    assert target.dtype is source.dtype
    assert source.is_cpu
    assert target.is_contiguous()
    assert source.is_contiguous()
    ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
    torch.autograd.graph.increment_version(target)  # so that autograd notices, as after ``copy_``


def copy_pieces(outputs: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> None:
    """Bring each piece to its output, which may have been made in inference mode.

    Args:
        outputs: tensors of any layout and shape.
        pieces: as many, each of as many elements as its output, and contiguous.
    """
    # Torch lets such tensors be written in that mode only; and this may be another thread than the one that called.
    if not torch.is_inference_mode_enabled() and any(output.is_inference() for output in outputs):
        with torch.inference_mode():
            copy_pieces(outputs, pieces)
        return
    for output, piece in zip(outputs, pieces, strict=True):
        output.detach().copy_(piece.view(output.shape))
