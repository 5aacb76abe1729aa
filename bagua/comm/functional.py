"""The collectives as functions: ``f(..., comm=None)`` is ``comm.f(...)``.

``comm`` is a communicator or a group of ``bagua.comm``, or a group of ``torch.distributed``, whose
members must all be calling when it is first given. ``None`` means all ranks. ``NON_MEMBER``, which
``new_group`` returns on ranks outside, makes the call return None at once. What each one takes, promises and
raises is said once, at the method of ``Communicator`` with the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.comm.pipeline import Timeout
from bagua.comm.reduction import ReduceOp
from bagua.comm.startup.adoption import Group, communicator_of
from bagua.comm.work import Work


def allreduce(
    tensor: torch.Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks, in place, bitwise identically everywhere.

    Example:
        With two ranks that hold ``[1, 2]`` and ``[3, 4]``, both hold ``[4, 6]`` afterwards.

        >>> import torch, bagua.comm
        >>> bagua.comm.init_process_group()
        >>> tensor = torch.tensor([1, 2])
        >>> bagua.comm.allreduce(tensor)
        >>> tensor
        tensor([1, 2])
        >>> bagua.comm.destroy_process_group()
    """
    return communicator_of(comm).allreduce(tensor, op, async_op=async_op, timeout=timeout)


def reduce(
    tensor: torch.Tensor,
    dst: int,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks into rank ``dst``; other ranks keep theirs."""
    return communicator_of(comm).reduce(tensor, dst, op, async_op=async_op, timeout=timeout)


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Copy ``tensor`` of rank ``root`` into the ``tensor`` of all other ranks."""
    return communicator_of(comm).broadcast(tensor, root, async_op=async_op, timeout=timeout)


def allgather(
    output: torch.Tensor,
    tensor: torch.Tensor,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Gather ``tensor`` of all ranks, in rank order, into ``output`` on every rank."""
    return communicator_of(comm).allgather(output, tensor, async_op=async_op, timeout=timeout)


def gather(
    output: torch.Tensor | None,
    tensor: torch.Tensor,
    dst: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Gather ``tensor`` of all ranks, in rank order, into ``output`` on rank ``dst``."""
    return communicator_of(comm).gather(output, tensor, dst, async_op=async_op, timeout=timeout)


def scatter(
    output: torch.Tensor,
    tensor: torch.Tensor | None = None,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Give each rank its share, in rank order, of ``tensor`` of rank ``root``."""
    return communicator_of(comm).scatter(output, tensor, root, async_op=async_op, timeout=timeout)


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks and give each rank its share, in rank order."""
    return communicator_of(comm).reduce_scatter(output, tensor, op, async_op=async_op, timeout=timeout)


def alltoall(
    output: torch.Tensor,
    tensor: torch.Tensor,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Send the j-th equal share of ``tensor`` to rank j, and receive likewise."""
    return communicator_of(comm).alltoall(output, tensor, async_op=async_op, timeout=timeout)


def alltoall_v(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_counts: Sequence[int],
    input_counts: Sequence[int],
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Like ``alltoall`` with shares of different sizes."""
    return communicator_of(comm).alltoall_v(
        output, tensor, output_counts, input_counts, async_op=async_op, timeout=timeout
    )


def send(
    tensor: torch.Tensor,
    dst: int,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Send ``tensor`` to rank ``dst``, which calls ``recv``."""
    return communicator_of(comm).send(tensor, dst, async_op=async_op, timeout=timeout)


def recv(
    tensor: torch.Tensor,
    src: int,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Receive into ``tensor`` what rank ``src`` sends."""
    return communicator_of(comm).recv(tensor, src, async_op=async_op, timeout=timeout)


def sendrecv(
    output: torch.Tensor,
    tensor: torch.Tensor,
    src: int,
    dst: int,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Send ``tensor`` to ``dst`` and receive ``output`` from ``src`` at the same time."""
    return communicator_of(comm).sendrecv(output, tensor, src, dst, async_op=async_op, timeout=timeout)


def barrier(
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """Return after every rank has called it."""
    return communicator_of(comm).barrier(async_op=async_op, timeout=timeout)


def allreduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``allreduce`` of each tensor with one message per dtype and device."""
    return communicator_of(comm).allreduce_coalesced(tensors, op, async_op=async_op, timeout=timeout)


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
) -> Work | None:
    """``broadcast`` of each tensor with one message per dtype and device."""
    return communicator_of(comm).broadcast_coalesced(tensors, root, async_op=async_op, timeout=timeout)


def broadcast_object(
    obj: object = None,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The object of rank ``root``, on every rank."""
    return communicator_of(comm).broadcast_object(
        obj, root, async_op=async_op, timeout=timeout, allow_pickle=allow_pickle
    )


def allgather_object(
    obj: object,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The objects of all ranks, in rank order, on every rank."""
    return communicator_of(comm).allgather_object(obj, async_op=async_op, timeout=timeout, allow_pickle=allow_pickle)


def gather_object(
    obj: object,
    dst: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """The objects of all ranks, in rank order, on rank ``dst``; None elsewhere."""
    return communicator_of(comm).gather_object(obj, dst, async_op=async_op, timeout=timeout, allow_pickle=allow_pickle)


def scatter_object(
    objs: Sequence[object] | None = None,
    root: int = 0,
    comm: Group | None = None,
    *,
    async_op: bool = False,
    timeout: Timeout = None,
    allow_pickle: bool = False,
) -> Any:
    """This rank's object out of the list of rank ``root``."""
    return communicator_of(comm).scatter_object(
        objs, root, async_op=async_op, timeout=timeout, allow_pickle=allow_pickle
    )
