"""What a rank holds of a group to which it does not belong."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist


class NonMember:
    """Stands for a group, or a communicator, of other ranks. There is one: ``NON_MEMBER``.

    Every call on it returns None at once and leaves its tensors as they are. It is false in a condition,
    its rank and size are -1, its communicators are itself. It is not None, which means all ranks.

    Example:
        >>> import torch
        >>> tensor = torch.ones(2)
        >>> NON_MEMBER.allreduce(tensor)
        >>> tensor, bool(NON_MEMBER), NON_MEMBER.rank
        (tensor([1., 1.]), False, -1)
    """

    rank = -1
    size = -1
    ranks: tuple[int, ...] = ()

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "NON_MEMBER"

    def __reduce__(self) -> str:
        return "NON_MEMBER"

    @property
    def global_communicator(self) -> NonMember:
        """Itself."""
        return self

    intra_node_communicator = inter_node_communicator = global_communicator

    def subgroup(self, *_: Any, **__: Any) -> NonMember:
        """Itself: a group of other ranks has no part for this one."""
        return self

    duplicate = subgroup
    get_global_communicator = get_intra_node_communicator = get_inter_node_communicator = subgroup

    def ignore(self, *_: Any, **__: Any) -> None:
        """Return None at once: the call is that of other ranks."""

    allreduce = reduce = broadcast = allreduce_coalesced = broadcast_coalesced = ignore
    allgather = gather = scatter = reduce_scatter = alltoall = alltoall_v = ignore
    send = recv = recv_any = sendrecv = barrier = ignore
    broadcast_object = allgather_object = gather_object = scatter_object = ignore
    send_object = recv_object = ignore
    abort = close = ignore


NON_MEMBER = NonMember()


def is_non_member(group: object) -> bool:
    """Whether ``group`` says that this rank does not belong to it: ours, or torch's sentinel."""
    theirs: object = dist.GroupMember.NON_GROUP_MEMBER
    return group is NON_MEMBER or (type(group) is type(theirs) and group == theirs)
