"""Several tensors in few messages. The functions are methods of ``Communicator``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bagua.comm.operands import check_rank
from bagua.comm.pipeline import Timeout
from bagua.comm.reduction import ReduceOp, reduction_name
from bagua.comm.transports.memory.copying import copy_pieces
from bagua.comm.work import Steps, Work
from bagua.errors import InvalidTensorError

__all__ = ["allreduce_coalesced", "broadcast_coalesced"]


def allreduce_coalesced(
    communicator: Any,
    tensors: Sequence[torch.Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``allreduce`` of each tensor, in place, with one message per dtype and device.

    Args:
        communicator: communicator whose ranks take part.
        tensors: equal in number, dtypes and sizes on all ranks.
        op: a ``ReduceOp`` with a meaning for every dtype in ``tensors``.
        async_op: return a ``Work`` at once; its result is the list of tensors.
        timeout: deadline of each message.
    """
    tensors = _listed(tensors)
    for tensor in tensors:
        communicator.intake.check(tensor, "tensors")
        reduction_name(op, tensor.dtype)
    return _coalesced(
        communicator,
        tensors,
        lambda flat: communicator.allreduce(flat, op, async_op=async_op, timeout=timeout),
        async_op,
    )


def broadcast_coalesced(
    communicator: Any,
    tensors: Sequence[torch.Tensor],
    root: int = 0,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``broadcast`` of each tensor, with one message per dtype and device.

    Args:
        communicator: communicator whose ranks take part.
        tensors: equal in number, dtypes and sizes on all ranks.
        root: the rank whose values are sent.
        async_op: return a ``Work`` at once; its result is the list of tensors.
        timeout: deadline of each message.
    """
    root = check_rank(root, communicator.size, "root")
    return _coalesced(
        communicator,
        _listed(tensors),
        lambda flat: communicator.broadcast(flat, root, async_op=async_op, timeout=timeout),
        async_op,
    )


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``, which may be gone through once only, as a list."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Iterable):
        seen = type(tensors).__name__
        raise InvalidTensorError("a list of tensors is needed", argument="tensors", expected="a list", seen=seen)
    return list(tensors)


def _coalesced(
    communicator: Any,
    tensors: list[torch.Tensor],
    start: Callable[[torch.Tensor], Work | None],
    async_op: bool,
) -> Work | None:
    targets = [communicator.intake.in_place(tensor, "tensors") for tensor in tensors]
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for plain, _ in targets:
        alike.setdefault((plain.dtype, plain.device), []).append(plain)

    def steps() -> Steps:
        flats = [torch.cat([part.view(-1) for part in parts]) for parts in alike.values()]
        works = [start(flat) for flat in flats]
        for work, flat, parts in zip(works, flats, alike.values(), strict=True):
            if work is not None:
                yield work
            copy_pieces(parts, torch.split(flat, [part.numel() for part in parts]))
        for _, finish in targets:
            if finish is not None:
                finish()
        return tensors

    work = communicator.pipeline.compose(steps(), async_op)
    return work if async_op else None
