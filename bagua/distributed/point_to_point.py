"""Messages between two ranks, with the names, arguments and meaning of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bagua.checks import check_kind, check_whole
from bagua.comm import Communicator, Group, TorchWork, Work, communicator_of, mail_of
from bagua.distributed.collectives import as_in_torch, rank_inside
from bagua.errors import ConfigurationError

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"]


def isend(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> TorchWork | None:
    """Start to send ``tensor`` to ``dst``. Unlike torch's, a message with a tag goes through the store, slowly."""
    return _send(tensor, dst, group, tag, group_dst, async_op=True)


def irecv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> TorchWork | None:
    """Start to receive into ``tensor`` what ``src``, or any rank, sends. As torch's; for tags see ``isend``."""
    communicator = communicator_of(group)
    if not communicator:
        return None
    work, _ = _receive(communicator, tensor, src, group_src, tag, async_op=True)
    return as_in_torch(communicator, work, [tensor])


def send(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send ``tensor`` to ``dst``. Unlike torch's, with a tag it does not wait for the receiver; see ``isend``."""
    _send(tensor, dst, group, tag, group_dst, async_op=False)


def recv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive ``tensor`` from ``src`` or any rank; returns the sender's rank. As torch's; for tags see ``isend``."""
    communicator = communicator_of(group)
    if not communicator:
        return -1
    work, inside = _receive(communicator, tensor, src, group_src, tag, async_op=False)
    return communicator.ranks[inside if work is None else work.result()]


def _send(
    tensor: Tensor, dst: int | None, group: Group | None, tag: int, group_dst: int | None, *, async_op: bool
) -> TorchWork | None:
    communicator = communicator_of(group)
    if not communicator:
        return None
    inside = rank_inside(communicator, dst, group_dst, "dst")
    if tag:
        _check_message(communicator, tensor, inside, "dst", tag)
        mail_of(communicator).send(tensor, inside, tag)
        return as_in_torch(communicator, None, [tensor], complete=async_op)
    return as_in_torch(communicator, communicator.send(tensor, inside, async_op=async_op), [tensor])


def _receive(
    communicator: Communicator, tensor: Tensor, src: int | None, group_src: int | None, tag: int, *, async_op: bool
) -> tuple[Work | None, int]:
    """The work, whose result is the sender where that is open; without one, the sender's rank in the communicator."""
    inside = None if src is None and group_src is None else rank_inside(communicator, src, group_src, "src")
    if tag:
        return _receive_tagged(communicator, tensor, inside, tag), -1
    if inside is not None:
        return communicator.recv(tensor, inside, async_op=async_op), inside
    found = communicator.recv_any(tensor, async_op=async_op)
    return (found, -1) if isinstance(found, Work) else (None, found)


def _receive_tagged(communicator: Communicator, tensor: Tensor, src: int | None, tag: int) -> Work:
    _check_message(communicator, tensor, src, "src", tag)
    return mail_of(communicator).receive(tensor, src, tag)


def _check_message(communicator: Communicator, tensor: Tensor, other: int | None, argument: str, tag: int) -> None:
    communicator.intake.check(tensor, "tensor")
    check_whole(0, tag=tag)
    if other is not None:
        communicator.intake.other(other, argument)


class P2POp:
    """One message of ``batch_isend_irecv``. As torch's.

    Args:
        op: ``isend`` or ``irecv`` of this module.
        tensor: tensor to send, or to receive into.
        peer: the other rank, among all ranks.
        group: both are members of it.
        tag: see ``isend``.
        group_peer: the other rank, in ``group``.
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Group | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ConfigurationError(
                "a message is sent or received",
                argument="op",
                expected="bagua.distributed.isend or bagua.distributed.irecv",
                seen=repr(op),
            )
        self.op = op
        self.tensor = tensor
        self.group = group
        self.tag = tag
        communicator = communicator_of(group)
        self.group_peer = rank_inside(communicator, peer, group_peer, "peer") if communicator else -1
        self.peer = communicator.ranks[self.group_peer] if communicator else -1

    def __repr__(self) -> str:
        other = f"{'dst' if self.op is isend else 'src'} {self.peer}"
        return f"P2POp({self.op.__name__}, {other}, {tuple(self.tensor.shape)}, {self.tensor.dtype})"


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[TorchWork]:
    """Start all messages, in any order of sends and receives, or none if one of them is refused.

    Unlike torch's, NCCL does not start them as one call. Between two ranks NCCL makes one message after the other, and
    connects two ranks in their first. So ranks start pair by pair, in one order, and of a pair one rank sends first.
    """
    check_kind(list, "a list of P2POp", p2p_op_list=p2p_op_list)
    for op in p2p_op_list:
        check_kind(P2POp, "a list of P2POp", p2p_op_list=op)
        communicator = communicator_of(op.group)
        if communicator:
            _check_message(communicator, op.tensor, op.group_peer, "peer", op.tag)
            if op.op is irecv:
                communicator.intake.in_place(op.tensor, "tensor", keep=False)
    started = {
        place: op.op(op.tensor, None, op.group, op.tag, op.group_peer)
        for place, op in sorted(enumerate(p2p_op_list), key=lambda found: _turn(found[1]))
    }
    return [work for _, work in sorted(started.items()) if work is not None]


def _turn(op: P2POp) -> tuple[int, int, bool]:
    """The lower rank of a pair, the higher one, and whether the message is the second of both."""
    communicator = communicator_of(op.group)
    rank = communicator.ranks[communicator.rank] if communicator else -1
    return min(rank, op.peer), max(rank, op.peer), (op.op is irecv) == (rank < op.peer)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Group | None = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    *,
    allow_pickle: bool = False,
) -> None:
    """Send objects to ``dst``. Unlike torch's, it pickles only with ``allow_pickle=True`` on both sides."""
    del device, use_batch  # Bytes travel from where the transport wants them, in one way.
    communicator = communicator_of(group)
    if communicator:
        inside = rank_inside(communicator, dst, group_dst, "dst")
        communicator.send_object(list(object_list), inside, allow_pickle=allow_pickle)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    allow_pickle: bool = False,
) -> int:
    """Receive objects from ``src``; returns its rank. Unlike torch's, it needs ``src`` and pickles only if asked."""
    del device, use_batch
    communicator = communicator_of(group)
    if not communicator:
        return -1
    inside = rank_inside(communicator, src, group_src, "src")
    received = communicator.recv_object(inside, allow_pickle=allow_pickle)
    if len(received) != len(object_list):
        raise ConfigurationError(
            "sender and receiver disagree on the number of objects",
            argument="object_list",
            expected=f"a list of {len(received)}, as was sent",
            seen=f"a list of {len(object_list)}",
        )
    object_list[:] = received
    return communicator.ranks[inside]
