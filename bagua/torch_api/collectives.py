"""The collectives in the forms of Bagua 0.9: what is sent comes first.

A second tensor selects 0.9's form of ``allreduce`` and ``reduce``. ``bagua.comm`` has the same
collectives with the output first, as ``torch.distributed`` has them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from bagua import comm as of
from bagua.checks import check_kind, renaming
from bagua.comm import (
    CallOptions,
    Communicator,
    Group,
    NonMember,
    ReduceOp,
    Work,
    as_seconds,
    backend_of,
    communicator_of,
    reduction_name,
)
from bagua.errors import ConfigurationError, InvalidTensorError, InvalidTypeError

__all__ = [
    "allgather",
    "allgather_inplace",
    "allreduce",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "broadcast",
    "broadcast_coalesced",
    "gather",
    "gather_inplace",
    "get_backend",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
]

_SENT_FIRST = {"tensor": "send_tensor", "output": "recv_tensor"}


def _or_into(in_place: Callable[..., Any], into: Callable[..., Any]) -> Callable[..., Any]:
    """``in_place``, or ``into`` if there is a second tensor."""

    @functools.wraps(in_place)
    def call(*arguments: Any, **keywords: Any) -> Any:
        two = (len(arguments) > 1 and isinstance(arguments[1], Tensor)) or "recv_tensor" in keywords
        return (into if two else in_place)(*arguments, **keywords)

    return call


@renaming(tensor="recv_tensor")
def _allreduce_into(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    communicator = communicator_of(comm)
    if communicator:
        _begin_reduction(communicator, send_tensor, recv_tensor, op, **keywords)
    return communicator.allreduce(recv_tensor, op, **keywords)


@renaming(tensor="recv_tensor")
def _reduce_into(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    dst: int,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    communicator = communicator_of(comm)
    if not communicator or communicator.rank != dst:
        reduce_from = renaming(tensor="send_tensor")(communicator.reduce)
        return reduce_from(send_tensor, dst, op, **keywords)  # which leaves it as it is
    _begin_reduction(communicator, send_tensor, recv_tensor, op, **keywords)
    return communicator.reduce(recv_tensor, dst, op, **keywords)


def _begin_reduction(
    communicator: Communicator,
    source: Tensor,
    target: Tensor,
    op: ReduceOp.RedOpType,
    async_op: bool = False,  # noqa: ARG001 - as in the call that follows
    timeout: float | timedelta | None = None,
) -> None:
    """Copy what is sent to where it is reduced, once it is certain that the call will not be refused."""
    communicator.intake.check(source, "send_tensor")
    communicator.intake.in_place(target, "recv_tensor", keep=False)
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise InvalidTensorError(
            "what is received must be like what is sent",
            argument="recv_tensor",
            expected=(tuple(source.shape), source.dtype),
            seen=(tuple(target.shape), target.dtype),
        )
    reduction_name(op, target.dtype)
    if timeout is not None:
        as_seconds(timeout)
    if communicator.usable:
        with torch.no_grad():
            target.copy_(source.reshape(target.shape))


allreduce = _or_into(of.allreduce, _allreduce_into)
reduce = _or_into(of.reduce, _reduce_into)


def get_backend(group: Group | None = None) -> str:
    """Name of the transport of ``group``: ``shm``, ``gloo``, ``nccl``, ``threads``, ``hybrid`` or ``solo``.

    Bagua 0.9 took the name of a model here, and returned the scheduler of its native core. What that was asked for is
    a method of the model: ``model.bagua_algorithm``, ``model.bagua_optimizers``, ``model.bagua_buckets``.

    Raises:
        NotInitializedError: ``group`` is None, without ``init_process_group``.
        InvalidTypeError: something else than a group.
    """
    if isinstance(group, str):
        raise InvalidTypeError(
            "there is no scheduler for each model",
            argument="group",
            expected="a group, or None for all ranks",
            seen=repr(group),
            advice="Ask the model: bagua_algorithm, bagua_optimizers, bagua_buckets.",
        )
    return backend_of(group)


def broadcast(
    tensor: Tensor, root: int = 0, comm: Group | None = None, *, src: int | None = None, **keywords: Unpack[CallOptions]
) -> Work | None:
    """Copy ``tensor`` of rank ``root``, or ``src``, into the ``tensor`` of all other ranks."""
    return of.broadcast(tensor, _one_root(root, src), comm, **keywords)


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    root: int = 0,
    comm: Group | None = None,
    *,
    src: int | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    """``broadcast`` of each tensor with one message per dtype and device."""
    return of.broadcast_coalesced(tensors, _one_root(root, src), comm, **keywords)


def _one_root(root: int, src: int | None) -> int:
    """The rank that both names mean."""
    if src is None or root in (0, src):
        return root if src is None else src
    raise ConfigurationError("two ranks are named", argument="src", expected=f"root={root} alone", seen=f"src={src}")


@renaming(**_SENT_FIRST)
def allgather(
    send_tensor: Tensor, recv_tensor: Tensor, comm: Group | None = None, **keywords: Unpack[CallOptions]
) -> Work | None:
    """Gather ``send_tensor`` of all ranks, in rank order, into ``recv_tensor`` on every rank."""
    return of.allgather(recv_tensor, send_tensor, comm, **keywords)


@renaming(output="tensor")
def allgather_inplace(tensor: Tensor, comm: Group | None = None, **keywords: Unpack[CallOptions]) -> Work | None:
    """Gather from each rank its part of ``tensor``: of n equal parts, the one with the number of the rank."""
    communicator = communicator_of(comm)
    if not communicator:
        return None
    check_kind(Tensor, "a tensor", tensor=tensor)
    share = tensor.numel() // communicator.size
    own = tensor.detach().reshape(-1).narrow(0, communicator.rank * share, share).clone()
    return communicator.allgather(tensor, own, **keywords)


@renaming(**_SENT_FIRST)
def gather(
    send_tensor: Tensor,
    recv_tensor: Tensor | None,
    dst: int = 0,
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    """Gather ``send_tensor`` of all ranks, in rank order, into ``recv_tensor`` on rank ``dst``; others need none."""
    communicator = communicator_of(comm)
    if _is_other(dst, communicator):
        _check_unused("recv_tensor", recv_tensor, communicator.size * send_tensor.numel())
        recv_tensor = None
    return communicator.gather(recv_tensor, send_tensor, dst, **keywords)


@renaming(output="tensor")
def gather_inplace(
    tensor: Tensor, count: int, dst: int, comm: Group | None = None, **keywords: Unpack[CallOptions]
) -> Work | None:
    """Gather ``count`` elements of each rank into ``tensor`` on rank ``dst``, whose own are in their place there.

    Args:
        tensor: tensor that this rank gives; on rank ``dst`` the parts of all ranks, in rank order.
        count: number of elements of a part.
        dst: the rank that gathers.
        comm: None means all ranks.
        keywords: keywords of ``bagua.comm.gather``.
    """
    communicator = communicator_of(comm)
    if not communicator:
        return None
    if communicator.rank != dst:
        return communicator.gather(None, _part(tensor, 0, count), dst, **keywords)
    own = _part(tensor, dst, count).clone()
    return communicator.gather(_begin(tensor, communicator.size * count), own, dst, **keywords)


@renaming(**_SENT_FIRST, root="src")
def scatter(
    send_tensor: Tensor | None,
    recv_tensor: Tensor,
    src: int = 0,
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    """Give each rank its share, in rank order, of ``send_tensor`` of rank ``src``; others need none."""
    communicator = communicator_of(comm)
    if _is_other(src, communicator):
        _check_unused("send_tensor", send_tensor, communicator.size * recv_tensor.numel())
        send_tensor = None
    return communicator.scatter(recv_tensor, send_tensor, src, **keywords)


@renaming(output="tensor", root="src")
def scatter_inplace(
    tensor: Tensor, count: int, src: int, comm: Group | None = None, **keywords: Unpack[CallOptions]
) -> Work | None:
    """Give each rank its ``count`` elements of ``tensor`` of rank ``src``, whose own stay in their place.

    Args:
        tensor: tensor that this rank receives into; on rank ``src`` the parts of all ranks, in rank order.
        count: number of elements of a part.
        src: the rank that gives.
        comm: None means all ranks.
        keywords: keywords of ``bagua.comm.scatter``.
    """
    communicator = communicator_of(comm)
    if not communicator:
        return None
    if communicator.rank != src:
        return communicator.scatter(_part(tensor, 0, count), None, src, **keywords)
    own = torch.empty_like(_part(tensor, src, count))
    return communicator.scatter(own, _begin(tensor, communicator.size * count), src, **keywords)


@renaming(**_SENT_FIRST)
def reduce_scatter(
    send_tensor: Tensor,
    recv_tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    """Reduce ``send_tensor`` over all ranks and give each rank its share, in rank order."""
    return of.reduce_scatter(recv_tensor, send_tensor, op, comm, **keywords)


@renaming(output="tensor")
def reduce_scatter_inplace(
    tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, comm: Group | None = None, **keywords: Unpack[CallOptions]
) -> Work | None:
    """``reduce_scatter`` whose result replaces the first of n equal parts of ``tensor``; the others stay."""
    communicator = communicator_of(comm)
    if not communicator:
        return None
    check_kind(Tensor, "a tensor", tensor=tensor)
    own = _part(tensor, 0, tensor.numel() // communicator.size)
    return communicator.reduce_scatter(own, tensor.detach().clone(), op, **keywords)


@renaming(**_SENT_FIRST)
def alltoall(
    send_tensor: Tensor, recv_tensor: Tensor, comm: Group | None = None, **keywords: Unpack[CallOptions]
) -> Work | None:
    """Send the j-th equal share of ``send_tensor`` to rank j, and receive likewise."""
    return of.alltoall(recv_tensor, send_tensor, comm, **keywords)


@renaming(output="tensor")
def alltoall_inplace(tensor: Tensor, comm: Group | None = None, **keywords: Unpack[CallOptions]) -> Work | None:
    """``alltoall`` whose result replaces what was sent."""
    check_kind(Tensor, "a tensor", tensor=tensor)
    return of.alltoall(tensor, tensor.detach().clone(), comm, **keywords)


@renaming(**_SENT_FIRST, output_counts="recv_counts", input_counts="send_counts")
def alltoall_v(
    send_tensor: Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    """Like ``alltoall`` with shares of different sizes, which lie one after the other.

    Args:
        send_tensor: tensor that this rank sends.
        send_counts: number of elements for each rank.
        send_displs: element at which each share begins.
        recv_tensor: tensor that this rank receives into.
        recv_counts: number of elements from each rank.
        recv_displs: element at which each share is to begin.
        comm: None means all ranks.
        keywords: keywords of ``bagua.comm.alltoall_v``.

    Raises:
        ConfigurationError: there are gaps between the shares, or they overlap.
    """
    _require_dense("send_displs", send_counts, send_displs)
    _require_dense("recv_displs", recv_counts, recv_displs)
    return of.alltoall_v(recv_tensor, send_tensor, recv_counts, send_counts, comm, **keywords)


@renaming(output="tensor", output_counts="counts", input_counts="counts")
def alltoall_v_inplace(
    tensor: Tensor,
    counts: Sequence[int],
    displs: Sequence[int],
    comm: Group | None = None,
    **keywords: Unpack[CallOptions],
) -> Work | None:
    """``alltoall_v`` whose result replaces what was sent: as many elements come from a rank as go there.

    Args:
        tensor: tensor that this rank sends, and then what it has received.
        counts: number of elements for each rank, and from it.
        displs: element at which each share begins.
        comm: None means all ranks.
        keywords: keywords of ``bagua.comm.alltoall_v``.

    Raises:
        ConfigurationError: there are gaps between the shares, or they overlap.
    """
    _require_dense("displs", counts, displs)
    shares = _begin(tensor, sum(counts))
    return of.alltoall_v(shares, shares.clone(), counts, counts, comm, **keywords)


def _is_other(rank: int, communicator: Communicator | NonMember) -> bool:
    """Whether ``rank`` is one of the other members."""
    return rank in range(communicator.size) and rank != communicator.rank


def _check_unused(argument: str, tensor: Tensor | None, numel: int) -> None:
    """Refuse a tensor that does not fit, also where it is not needed: Bagua 0.9 wants it on every rank."""
    if tensor is not None and tensor.numel() != numel:
        raise InvalidTensorError(
            "the tensor of all ranks has another size than their parts together",
            argument=argument,
            expected=f"{numel} elements, or None on this rank",
            seen=tensor.numel(),
        )


def _part(tensor: Tensor, position: int, count: int) -> Tensor:
    """Of the parts of ``count`` elements that lie one after the other in ``tensor``, the one at ``position``."""
    return _begin(tensor, (position + 1) * count)[position * count :]


def _begin(tensor: Tensor, numel: int) -> Tensor:
    """The first elements of ``tensor``, in their place."""
    check_kind(Tensor, "a tensor", tensor=tensor)
    if not tensor.is_contiguous() or not 0 <= numel <= tensor.numel():
        raise InvalidTensorError(
            "parts of a tensor are exchanged in place",
            argument="tensor",
            expected=f"a contiguous tensor of at least {numel} elements",
            seen=f"{tensor.numel()} elements, strides {tensor.stride()}",
        )
    return tensor.detach().view(-1)[:numel]


def _require_dense(name: str, counts: Sequence[int], displacements: Sequence[int]) -> None:
    expected = [0, *itertools.accumulate(counts)][:-1]
    if list(displacements) != expected:
        raise ConfigurationError(
            "shares lie one after the other", argument=name, expected=expected, seen=list(displacements)
        )
