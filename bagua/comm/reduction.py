"""Which reductions exist for which dtypes, and how we add where we do the adding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bagua.errors import InvalidReduceOpError, InvalidTensorError

ReduceOp = dist.ReduceOp

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BOOL = frozenset({torch.bool})
_FLOAT8 = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
_REDUCIBLE = _FLOATS | _COMPLEX | _INTEGERS | _BOOL
_COPIED = _FLOAT8 | {torch.uint16, torch.uint32, torch.uint64}
#: The dtypes that collectives carry; those that are only copied among them.
COMMUNICABLE = _REDUCIBLE | _COPIED

_ALLOWED: dict[str, frozenset[torch.dtype]] = {
    "sum": _REDUCIBLE,
    "product": _REDUCIBLE,
    "min": _FLOATS | _INTEGERS | _BOOL,
    "max": _FLOATS | _INTEGERS | _BOOL,
    "avg": _FLOATS | _COMPLEX,
    "band": _INTEGERS | _BOOL,
    "bor": _INTEGERS | _BOOL,
    "bxor": _INTEGERS | _BOOL,
}

#: By name.
OPERATIONS: dict[str, Any] = {name: getattr(ReduceOp, name.upper()) for name in _ALLOWED}

#: One look-up answers both "is this legal" and "what is it called".
_LEGAL = {(op, dtype): name for name, op in OPERATIONS.items() for dtype in _ALLOWED[name]}

_FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

#: Reductions of bool, expressed on its bytes (0 or 1).
_BOOL_AS_BYTES = {
    "sum": "max",
    "max": "max",
    "bor": "max",
    "product": "min",
    "min": "min",
    "band": "min",
    "bxor": "bxor",
}


def reduction_name(op: object, dtype: torch.dtype) -> str:
    """Name of the reduction ``op`` for tensors of ``dtype``.

    Args:
        op: a ``torch.distributed.ReduceOp`` value.
        dtype: dtype of the tensors to reduce.

    Returns:
        One of ``sum, product, min, max, avg, band, bor, bxor``.

    Raises:
        InvalidReduceOpError: ``op`` is unknown or has no meaning for ``dtype``.

    Example:
        >>> reduction_name(ReduceOp.AVG, torch.float16)
        'avg'
    """
    try:
        return _LEGAL[op, dtype]
    except (KeyError, TypeError):
        return _explain(op, dtype)


def _explain(op: object, dtype: torch.dtype) -> str:
    for name, known in OPERATIONS.items() if isinstance(op, ReduceOp) else ():
        if op == known:  # a ReduceOp object rather than the enum's value
            if dtype in _ALLOWED[name]:
                return name
            dtypes = sorted(str(allowed) for allowed in _ALLOWED[name])
            raise InvalidReduceOpError(
                f"{name.upper()} has no meaning for {dtype}",
                argument="op",
                expected=f"{name.upper()} of one of {', '.join(dtypes)}",
                seen=dtype,
                advice="Convert the tensor or choose another reduction.",
            )
    raise InvalidReduceOpError(
        "unknown reduction",
        argument="op",
        expected="one of ReduceOp." + ", ReduceOp.".join(map(str.upper, OPERATIONS)),
        seen=repr(op),
        advice="For PREMUL_SUM, multiply the tensor and use SUM; bagua.distributed does it for you."
        if isinstance(op, ReduceOp)
        else "",
    )


def check_communicable(dtype: torch.dtype, argument: str) -> None:
    """Raise ``InvalidTensorError`` for a dtype that no collective carries (quantized ones, say)."""
    if dtype not in COMMUNICABLE:
        raise InvalidTensorError(
            "this dtype cannot be communicated",
            argument=argument,
            expected="a floating, complex, integer or bool dtype",
            seen=dtype,
        )


def dtype_by_name(name: object) -> torch.dtype | None:
    """The communicable dtype that prints as ``torch.<name>``, if there is one."""
    return next((dtype for dtype in COMMUNICABLE if str(dtype) == f"torch.{name}"), None)


def bytes_reduction(name: str) -> str:
    """The reduction of uint8 that does to the bytes of bool tensors what ``name`` does to them."""
    return _BOOL_AS_BYTES[name]


def wide_dtype(dtype: torch.dtype, name: str) -> torch.dtype:
    """The dtype in which ``name`` accumulates: float32 for sums and products of 16-bit floats."""
    if dtype in (torch.float16, torch.bfloat16) and name in ("sum", "avg", "product"):
        return torch.float32
    return dtype


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
    if len(parts) == 1:
        return out if out is parts[0] else out.copy_(parts[0])
    wide = wide_dtype(out.dtype, name)
    if out.numel() > _CHUNK and (len(parts) > 2 or wide is not out.dtype) and out.dim() == 1:
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
