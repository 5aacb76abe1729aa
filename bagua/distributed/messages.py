"""Messages between two ranks, with the names, arguments and meaning of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bagua.checks import check_kind
from bagua.comm import Group
from bagua.comm.adoption import communicator_of
from bagua.comm.torch_backend_work import TorchWork
from bagua.distributed.places import as_in_torch, rank_inside, refuse
from bagua.errors import ConfigurationError

__all__ = ["P2POp", "batch_isend_irecv", "irecv", "isend", "recv", "recv_object_list", "send", "send_object_list"]

_NO_TAGS = "Leave the tag out: messages between two ranks keep their order."


def _source(communicator: Any, src: int | None, group_src: int | None) -> int:
    if src is None and group_src is None:
        raise ConfigurationError(
            "a message is received from a rank that is named",
            argument="src",
            expected="the rank that sends",
            seen=None,
            advice="Messages are matched by their sender here. Name it, or let all ranks use gather.",
        )
    return rank_inside(communicator, src, group_src, "src")


def isend(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> TorchWork | None:
    """Start to send ``tensor`` to ``dst``. Unlike torch's, it takes no ``tag``."""
    communicator = communicator_of(group)
    if not communicator:
        return None
    refuse("tag", tag, 0, _NO_TAGS)
    inside = rank_inside(communicator, dst, group_dst, "dst")
    return as_in_torch(communicator.send(tensor, inside, async_op=True), [tensor])


def irecv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> TorchWork | None:
    """Start to receive into ``tensor`` what ``src`` sends. Unlike torch's, it takes no ``tag``, and needs ``src``."""
    communicator = communicator_of(group)
    if not communicator:
        return None
    refuse("tag", tag, 0, _NO_TAGS)
    inside = _source(communicator, src, group_src)
    return as_in_torch(communicator.recv(tensor, inside, async_op=True), [tensor])


def send(
    tensor: Tensor, dst: int | None = None, group: Group | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send ``tensor`` to ``dst``. Unlike torch's, it takes no ``tag``."""
    communicator = communicator_of(group)
    if communicator:
        refuse("tag", tag, 0, _NO_TAGS)
        communicator.send(tensor, rank_inside(communicator, dst, group_dst, "dst"))


def recv(
    tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receive ``tensor`` from ``src``; returns its rank. Unlike torch's, it takes no ``tag`` and needs ``src``."""
    communicator = communicator_of(group)
    if not communicator:
        return -1
    refuse("tag", tag, 0, _NO_TAGS)
    inside = _source(communicator, src, group_src)
    communicator.recv(tensor, inside)
    return communicator.ranks[inside]


class P2POp:
    """One message of ``batch_isend_irecv``. As torch's.

    Args:
        op: ``isend`` or ``irecv`` of this module.
        tensor: what to send, or where to receive.
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
    """Start all messages, in any order of sends and receives. Unlike torch's, NCCL does not start them as one call."""
    check_kind(list, "a list of P2POp", p2p_op_list=p2p_op_list)
    for op in p2p_op_list:
        check_kind(P2POp, "a list of P2POp", p2p_op_list=op)
    started = [op.op(op.tensor, None, op.group, op.tag, op.group_peer) for op in p2p_op_list]
    return [work for work in started if work is not None]


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
    inside = _source(communicator, src, group_src)
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
