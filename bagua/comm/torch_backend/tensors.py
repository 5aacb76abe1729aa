"""What torch's calls on a process group hand over, checked and brought into the form that our calls take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from bagua.comm.torch_forms.lists import flat, rows_for
from bagua.comm.torch_private import end_coalescing, method_of, start_coalescing
from bagua.errors import InvalidTensorError


def as_one(backend: Any, name: str, outputs: list[Tensor], tensors: list[Tensor], opts: Any) -> Any:
    """Several calls of one kind as one work; a backend has no methods for that in Python."""
    call = method_of(backend, name)
    start_coalescing(backend)
    for output, tensor in zip(outputs, tensors, strict=True):
        call(output, tensor, opts)
    return end_coalescing(backend)


#: How the rows of a tensor are reduced to one.
REDUCE_ROWS: dict[Any, Callable[[Tensor], Tensor]] = {
    dist.ReduceOp.SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    dist.ReduceOp.PRODUCT: lambda rows: rows.prod(0, dtype=rows.dtype),
    dist.ReduceOp.MIN: lambda rows: rows.amin(0),
    dist.ReduceOp.MAX: lambda rows: rows.amax(0),
}


def first(tensors: Sequence[Tensor]) -> Tensor:
    """The first of ``tensors``."""
    if not tensors:
        raise InvalidTensorError("a call needs a tensor", argument="tensors", expected="a tensor", seen="none")
    return tensors[0]


def only(items: Any) -> Any:
    """The only one of ``items``; a tensor that is not in a list is meant itself."""
    if isinstance(items, Tensor):
        return items
    if len(items) != 1:
        raise InvalidTensorError(
            "this call takes one tensor at a time", argument="tensors", expected="one", seen=len(items)
        )
    return items[0]


def require_equal(what: str, expected: int, seen: int) -> None:
    """Raise unless there are as many as a call needs."""
    if expected != seen:
        raise InvalidTensorError(f"wrong number of {what}", argument="tensors", expected=expected, seen=seen)


def rows_of(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of tensors that are alike, one in each row."""
    first(tensors)
    rows_for(tensors)  # checks that
    return flat(tensors).view(len(tensors), -1)
