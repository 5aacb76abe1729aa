"""Sums over all ranks, in full precision."""

from __future__ import annotations

import torch

from bagua.comm import ProcessGroup, Work
from bagua.primitives.hierarchical import hierarchical_sum

__all__ = ["allreduce_sum"]


def allreduce_sum(
    tensor: torch.Tensor, group: ProcessGroup, *, hierarchical: bool = False, async_op: bool = False
) -> Work | None:
    """Sum ``tensor`` over all ranks of ``group``, in place, bitwise identically everywhere.

    Args:
        tensor: equal in dtype and number of elements on all ranks.
        group: the ranks that take part.
        hierarchical: inside each host first, then between hosts, then inside again; see
            ``hierarchical_sum``. Blocks, whatever ``async_op`` says.
        async_op: return a ``Work`` at once.

    Returns:
        A ``Work`` if the sum is still under way, else None.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(3)
        >>> allreduce_sum(tensor, solo_group())
        >>> tensor
        tensor([1., 1., 1.])
    """
    if hierarchical and len(group.node_sizes) > 1 and max(group.node_sizes) > 1:
        hierarchical_sum(tensor, group)
        return None
    return group.global_communicator.allreduce(tensor, async_op=async_op)
