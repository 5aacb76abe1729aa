"""Sums over all ranks, in full and in low precision, flat and by host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.comm import Communicator, ProcessGroup
from bagua.primitives.reducers import summing_dtype

__all__ = ["on_leaders", "scatter_gather_sum", "sum_over"]

#: What some ranks do with a tensor of theirs, on the communicator that they share.
_Act = Callable[[torch.Tensor, Communicator], object]


def on_leaders(tensor: torch.Tensor, group: ProcessGroup, between_hosts: _Act) -> None:
    """Sum ``tensor`` inside each host, let the hosts' leaders change the sums, and spread the result.

    What the leaders see are sums, not means, so that hosts of unequal size keep their
    weight: a mean over ranks is the sum over hosts, divided once by the number of ranks.

    Args:
        tensor: equal in dtype and number of elements on all ranks; changed in place.
        group: the ranks that take part, and who leads on each host.
        between_hosts: called on leaders with the sum over their host and the communicator
            of all leaders.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(2)
        >>> on_leaders(tensor, solo_group(), lambda total, leaders: leaders.allreduce(total))
        >>> tensor
        tensor([1., 1.])
    """
    local = group.intra_node_communicator
    if local.size > 1:
        local.reduce(tensor, group.leader)
    through_leaders(tensor, group, between_hosts)


def through_leaders(tensor: torch.Tensor, group: ProcessGroup, between_hosts: _Act) -> None:
    """Let the hosts' leaders change ``tensor``, and give the result to the ranks of each host.

    Args:
        tensor: equal in dtype and number of elements on all ranks; changed in place.
        group: the ranks that take part, and who leads on each host.
        between_hosts: called on leaders with their own tensor and the communicator of all leaders.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(2)
        >>> through_leaders(tensor, solo_group(), lambda own, leaders: leaders.allreduce(own))
        >>> tensor
        tensor([1., 1.])
    """
    local, leaders = group.intra_node_communicator, group.inter_node_communicator
    if leaders:
        between_hosts(tensor, leaders)
    if local.size > 1:
        local.broadcast(tensor, group.leader)


def sum_over(tensor: torch.Tensor, group: ProcessGroup, act: _Act, *, hierarchical: bool = False) -> None:
    """Let ``act`` sum ``tensor``, in place, over all ranks of ``group``; or over its hosts, if they matter.

    Args:
        tensor: equal in dtype and number of elements on all ranks.
        group: the ranks that take part; its hosts may hold different numbers of them.
        act: sums over the ranks of a communicator, as ``lambda total, ranks: ranks.allreduce(total)``, a reducer, or
            ``scatter_gather_sum``.
        hierarchical: inside each host first, in full, then between hosts, then inside again, so that each host's sum
            travels once. With a single host, or a single rank on each, all ranks sum together.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(3)
        >>> sum_over(tensor, solo_group(), lambda total, ranks: ranks.allreduce(total), hierarchical=True)
        >>> tensor
        tensor([1., 1., 1.])
    """
    if hierarchical and group.has_two_levels:
        on_leaders(tensor, group, act)
    else:
        act(tensor, group.global_communicator)


def scatter_gather_sum(flat: torch.Tensor, communicator: Communicator, scratch: torch.Tensor) -> None:
    """Sum ``flat`` over all ranks of ``communicator``, in place: each adds up one slice, and sends it to everyone.

    The order of additions is that of the ranks, in single precision at least, rounded once; the
    result is bitwise identical everywhere.

    Args:
        flat: one-dimensional and contiguous; equal in dtype and size on all ranks. A size that the number of ranks
            divides saves two copies.
        communicator: communicator of the ranks that take part.
        scratch: like ``flat``; its contents do not matter.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(3)
        >>> scatter_gather_sum(tensor, solo_group().global_communicator, torch.empty(3))
        >>> tensor
        tensor([1., 1., 1.])
    """
    size = communicator.size
    length = -(-flat.numel() // size)
    even, received = flat, scratch
    if length * size != flat.numel():
        even = torch.nn.functional.pad(flat, (0, length * size - flat.numel()))
        received = torch.empty_like(even)
    communicator.alltoall(received, even)
    own = received.view(size, length).sum(dim=0, dtype=summing_dtype(flat.dtype)).to(flat.dtype)
    communicator.allgather(even, own)
    if even is not flat:
        flat.copy_(even[: flat.numel()])
