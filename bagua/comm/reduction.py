"""The reductions, how we add where we do the adding, and copies of what comes of it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

ReduceOp = dist.ReduceOp

_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "avg": torch.add,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
#: By name.
OPERATIONS: dict[str, Any] = {name: getattr(ReduceOp, name.upper()) for name in _FOLDS}


_NARROW = frozenset({torch.float16, torch.bfloat16})


def wide_dtype(dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype in which ``name`` accumulates: float32 for sums and products of 16-bit floats."""
    return torch.float32 if dtype in _NARROW and name in ("sum", "avg", "product") else dtype


#: Elements that are reduced at once; measured with 2 to 8 parts of float32 and bfloat16.
_CHUNK = 65536


def fold(parts: list[torch.Tensor], name: str, out: torch.Tensor) -> torch.Tensor:
    """Reduce ``parts`` in their order into ``out`` and return it.

    The order is fixed, so every rank that folds the same parts gets the same
    bits. 16-bit floats accumulate in float32 and are rounded once.

    Args:
        parts: one tensor per rank, equal in shape and dtype.
        name: the reduction, as ``reduction_name`` returns it.
        out: tensor that receives the result; it may be one of the parts.

    Example:
        >>> parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
        >>> fold(parts, "avg", torch.empty(2))
        tensor([2.0000, 3.5000])
    """
    dtype, size = out.dtype, len(parts)
    if size == 2 and dtype not in _NARROW:  # In one pass, and most calls are small.
        _FOLDS[name](parts[0], parts[1], out=out)
        return divide(out, 2) if name == "avg" else out
    if size == 1:
        return out if out is parts[0] else out.copy_(parts[0])
    wide = wide_dtype(dtype, name)
    if out.numel() > _CHUNK and out.dim() == 1:
        # Several passes over the same elements: while these are still in the cache.
        for *chunks, target in zip(*(torch.unsafe_split(part, _CHUNK) for part in (*parts, out)), strict=True):
            _fold(chunks, name, wide, target)
        if not out.is_inference():  # Autograd does not know chunks that are split in this way, which is the quickest.
            torch.autograd.graph.increment_version(out)
        return out
    return _fold(parts, name, wide, out)


def _fold(parts: list[torch.Tensor], name: str, wide: torch.dtype, out: torch.Tensor) -> torch.Tensor:
    operation = _FOLDS[name]
    alias = len(parts) > 2 and any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    direct = wide is out.dtype and not alias
    total = out if direct else torch.empty_like(out, dtype=wide)
    operation(parts[0] if direct else parts[0].to(wide), parts[1], out=total)
    for part in parts[2:]:
        operation(total, part, out=total)
    if name == "avg":
        divide(total, len(parts))
    return out if direct else out.copy_(total)


#: Exact ones, as tensors: torch makes one of each number that it is given, which takes longer than to multiply by it.
_RECIPROCALS = {
    (dtype, by): torch.tensor(1.0 / by, dtype=dtype, device="cpu")
    for dtype in (torch.float32, torch.float64)
    for by in (2, 4, 8, 16)
}


def divide(total: torch.Tensor, by: int) -> torch.Tensor:
    """Divide ``total`` by ``by`` in place and return it.

    The bits are those of ``total.div_(by)``. Where the reciprocal is exact it takes a third of the time.

    Args:
        total: tensor of a floating or complex dtype.
        by: at least one.

    Example:
        >>> divide(torch.tensor([1.0, 3.0]), 2)
        tensor([0.5000, 1.5000])
    """
    factor = _RECIPROCALS.get((total.dtype, by))
    if factor is not None:
        return total.mul_(factor)
    if by & (by - 1) or total.is_complex():
        return total.div_(by)
    return total.mul_(1.0 / by)


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
