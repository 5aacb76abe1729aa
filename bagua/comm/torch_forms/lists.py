"""Collectives on lists of tensors, and on rows of one, as ``torch.distributed`` has them, and sums with factors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from bagua.checks import check_kind
from bagua.comm.communicator import Communicator
from bagua.comm.pipeline import CallOptions
from bagua.comm.reduction import ReduceOp
from bagua.comm.torch_private import premul_factor
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.comm.work import Work, followed
from bagua.errors import InvalidReduceOpError, InvalidTensorError


def flat(parts: Sequence[Tensor]) -> Tensor:
    """All elements of ``parts``, one after the other, in new memory."""
    return torch.cat([part.detach().reshape(-1) for part in parts])


def rows_for(outputs: Sequence[Tensor]) -> Tensor:
    """Memory for what all ranks send, a row for each output.

    Raises:
        InvalidTensorError: the outputs differ in size or dtype.
    """
    kinds = {(output.numel(), output.dtype) for output in outputs}
    if len(kinds) != 1:
        raise InvalidTensorError(
            "the outputs of one gather must be alike",
            argument="output tensors",
            expected="a list of tensors of one size and dtype",
            seen=[(tuple(output.shape), output.dtype) for output in outputs],
        )
    return outputs[0].new_empty(len(outputs), outputs[0].numel())


def _counts_of_rows(tensor: Tensor, rows: Sequence[int], size: int) -> list[int]:
    """How many elements are in the given rows for each rank; none given means equal shares."""
    width = math.prod(tensor.shape[1:])
    return [count * width for count in rows or [len(tensor) // size] * size]


def allgather_tensors(
    communicator: Communicator, outputs: Sequence[Tensor], tensor: Tensor, **how: Unpack[CallOptions]
) -> Work | None:
    """Gather ``tensor`` of all ranks into a list of one output for each rank."""
    _check_list("tensor_list", outputs, communicator.size, tensor.dtype)
    rows = rows_for(outputs)
    work = communicator.allgather(rows, tensor, **how)
    return followed(work, lambda: copy_pieces(outputs, rows.unbind()))


def gather_tensors(
    communicator: Communicator, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, **how: Unpack[CallOptions]
) -> Work | None:
    """Gather ``tensor`` of all ranks into a list on rank ``dst``; None or an empty list elsewhere."""
    if not _only_on(dst, communicator, "gather_list", outputs):
        return communicator.gather(None, tensor, dst, **how)
    assert outputs is not None
    _check_list("gather_list", outputs, communicator.size, tensor.dtype)
    rows = rows_for(outputs)
    work = communicator.gather(rows, tensor, dst, **how)
    return followed(work, lambda: copy_pieces(outputs, rows.unbind()))


def scatter_tensors(
    communicator: Communicator, output: Tensor, tensors: Sequence[Tensor] | None, root: int, **how: Unpack[CallOptions]
) -> Work | None:
    """Give each rank its tensor of the list of rank ``root``; None or an empty list elsewhere."""
    if not _only_on(root, communicator, "scatter_list", tensors):
        return communicator.scatter(output, None, root, **how)
    assert tensors is not None
    _check_list("scatter_list", tensors, communicator.size, output.dtype)
    rows_for(tensors)
    return communicator.scatter(output, flat(tensors), root, **how)


def reduce_scatter_tensors(
    communicator: Communicator,
    output: Tensor,
    tensors: Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    **how: Unpack[CallOptions],
) -> Work | None:
    """Reduce lists of tensors over all ranks, and give each rank its part."""
    _check_list("input_list", tensors, communicator.size, output.dtype)
    rows_for(tensors)
    return communicator.reduce_scatter(output, flat(tensors), op, **how)


def alltoall_tensors(
    communicator: Communicator, outputs: Sequence[Tensor], tensors: Sequence[Tensor], **how: Unpack[CallOptions]
) -> Work | None:
    """Send one tensor to each rank and receive one from each; sizes may differ."""
    _check_list("input_tensor_list", tensors, communicator.size)
    _check_list("output_tensor_list", outputs, communicator.size, tensors[0].dtype)
    received, sent = [output.numel() for output in outputs], [tensor.numel() for tensor in tensors]
    target = outputs[0].new_empty(sum(received))
    work = communicator.alltoall_v(target, flat(tensors), received, sent, **how)
    return followed(work, lambda: copy_pieces(outputs, torch.split(target, received)))


def alltoall_rows(
    communicator: Communicator,
    output: Tensor,
    tensor: Tensor,
    output_rows: Sequence[int] | None,
    input_rows: Sequence[int] | None,
    **how: Unpack[CallOptions],
) -> Work | None:
    """Send some of the first dimension to each rank; the same to each if no sizes are given."""
    if not output_rows and not input_rows:
        return communicator.alltoall(output, tensor, **how)
    received = _counts_of_rows(output, output_rows or (), communicator.size)
    sent = _counts_of_rows(tensor, input_rows or (), communicator.size)
    return communicator.alltoall_v(output, tensor, received, sent, **how)


def _only_on(rank: int, communicator: Communicator, argument: str, tensors: Sequence[Tensor] | None) -> bool:
    """Whether this is ``rank``, which gives a list where others give none."""
    here = communicator.rank == rank
    if here is not bool(tensors):
        raise InvalidTensorError(
            "one rank gives the list",
            argument=argument,
            expected=f"a list of {communicator.size} tensors on rank {rank} of the group, None on others",
            seen=f"{'a list' if tensors else 'no list'} on rank {communicator.rank}",
        )
    return here


def _check_list(argument: str, tensors: Any, size: int, dtype: torch.dtype | None = None) -> None:
    """Raise ``InvalidTensorError`` unless there is one tensor for each rank, of ``dtype`` or the first one's."""
    of_tensors = isinstance(tensors, Sequence) and all(isinstance(tensor, Tensor) for tensor in tensors)
    if not of_tensors or len(tensors) != size:
        raise InvalidTensorError(
            "a list of one tensor for each rank is needed",
            argument=argument,
            expected=f"a list of {size} tensors",
            seen=f"{len(tensors)} of them" if of_tensors else type(tensors).__name__,
        )
    dtype = dtype or tensors[0].dtype
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes != {dtype}:
        raise InvalidTensorError(
            "all tensors of one call have one dtype", argument=argument, expected=dtype, seen=sorted(map(str, dtypes))
        )


# ``ReduceOp.PREMUL_SUM``: each rank multiplies its input by a factor of its own before all are added.


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
        >>> from bagua.comm.torch_private import make_premul_sum
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
