"""``ReduceOp.PREMUL_SUM``: each rank multiplies its input by a factor of its own before all are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from bagua.checks import check_kind
from bagua.comm.reduction import ReduceOp
from bagua.comm.torch_private import make_premul_sum, premul_factor
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.errors import InvalidReduceOpError

__all__ = ["is_scaled", "make_premul_sum", "scale", "scaled"]


def is_scaled(op: Any) -> bool:
    """Whether ``op`` has a factor: the name ``ReduceOp.PREMUL_SUM`` alone has none."""
    return type(op) is ReduceOp and bool(op == ReduceOp.PREMUL_SUM)  # type: ignore[comparison-overlap]  # torch's stub


def scaled(op: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor times the factor of ``op``, in new memory.

    Args:
        op: result of ``make_premul_sum``.
        tensors: tensors of floating dtypes, as on NCCL.

    Raises:
        InvalidTypeError: something else than a tensor.
        InvalidReduceOpError: another dtype.

    Example:
        >>> import torch
        >>> scaled(make_premul_sum(0.5), [torch.ones(2)])
        [tensor([0.5000, 0.5000])]
    """
    for tensor in tensors:
        check_kind(Tensor, "a tensor", tensor=tensor)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise InvalidReduceOpError(
                f"PREMUL_SUM has no meaning for {tensor.dtype}",
                argument="op",
                expected="PREMUL_SUM of a floating dtype of 16 bits and more",
                seen=tensor.dtype,
                advice="Multiply the tensor before the call, and use SUM.",
            )
    factor = premul_factor(op)
    return [(tensor.detach() * factor).to(tensor.dtype).contiguous() for tensor in tensors]


def scale(op: Any, tensors: Sequence[Tensor]) -> None:
    """Multiply each tensor, in place; see ``scaled``."""
    copy_pieces(tensors, scaled(op, tensors))
