"""Sums over all ranks, in full and in low precision, flat and by host, and what tells hosts from their ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.comm import Communicator, ProcessGroup
from bagua.primitives.reducers import ReducerMemory, SumReducer, summing_dtype

#: What some ranks do with a tensor of theirs, on the communicator that they share.
_Act = Callable[[torch.Tensor, Communicator], object]


def has_two_levels(group: ProcessGroup) -> bool:
    """Whether hosts matter: not when there is one, or one rank on each.

    Example:
        >>> from bagua.comm import solo_group
        >>> has_two_levels(solo_group())
        False
    """
    return len(group.node_sizes) > 1 and max(group.node_sizes) > 1


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


def hierarchical_sum(tensor: torch.Tensor, group: ProcessGroup) -> None:
    """Sum ``tensor`` over all ranks of ``group``, sending each host's sum over the network once.

    Args:
        tensor: equal in dtype and number of elements on all ranks; changed in place.
        group: the ranks that take part; its hosts may hold different numbers of them.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(2)
        >>> hierarchical_sum(tensor, solo_group())
        >>> tensor
        tensor([1., 1.])
    """
    on_leaders(tensor, group, lambda total, leaders: leaders.allreduce(total))


def allreduce_sum(tensor: torch.Tensor, group: ProcessGroup, *, hierarchical: bool = False) -> None:
    """Sum ``tensor`` over all ranks of ``group``, in place, bitwise identically everywhere.

    Args:
        tensor: equal in dtype and number of elements on all ranks.
        group: the ranks that take part.
        hierarchical: inside each host first, then between hosts, then inside again; see
            ``hierarchical_sum``.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(3)
        >>> allreduce_sum(tensor, solo_group())
        >>> tensor
        tensor([1., 1., 1.])
    """
    _between(tensor, group, lambda total, ranks: ranks.allreduce(total), hierarchical=hierarchical)


def scatter_gather_sum(
    tensor: torch.Tensor, group: ProcessGroup, scratch: torch.Tensor, *, hierarchical: bool = False
) -> None:
    """Sum ``tensor`` over all ranks of ``group``, in place: each rank adds up one slice, and sends it to everyone.

    The order of additions is that of the ranks, in single precision at least, rounded once; the
    result is bitwise identical everywhere.

    Args:
        tensor: one-dimensional and contiguous; equal in dtype and size on all ranks. A size that
            the number of ranks (of hosts, with ``hierarchical``) divides saves two copies.
        group: the ranks that take part.
        scratch: like ``tensor``; its contents do not matter.
        hierarchical: inside each host first, in full, then between hosts, then inside again.

    Example:
        >>> from bagua.comm import solo_group
        >>> tensor = torch.ones(3)
        >>> scatter_gather_sum(tensor, solo_group(), torch.empty(3))
        >>> tensor
        tensor([1., 1., 1.])
    """
    _between(tensor, group, lambda flat, ranks: _scatter_gather(flat, ranks, scratch), hierarchical=hierarchical)


def _between(tensor: torch.Tensor, group: ProcessGroup, act: _Act, *, hierarchical: bool) -> None:
    """Let ``act`` sum between all ranks, or between hosts if they matter."""
    if hierarchical and has_two_levels(group):
        on_leaders(tensor, group, act)
    else:
        act(tensor, group.global_communicator)


def _scatter_gather(flat: torch.Tensor, communicator: Communicator, scratch: torch.Tensor) -> None:
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


def reducer_sum(
    tensor: torch.Tensor, group: ProcessGroup, reducer: SumReducer, memory: ReducerMemory, *, hierarchical: bool = False
) -> None:
    """Replace ``tensor`` by what ``reducer`` makes of its sum over all ranks, bitwise identically everywhere.

    Args:
        tensor: one-dimensional and contiguous; equal in dtype and size on all ranks.
        group: the ranks that take part.
        reducer: for example ``ScatterGatherReducer(MinMaxUInt8())``.
        memory: memory of the reducer, for this tensor; ``settle`` it afterwards.
        hierarchical: sum inside each host in full precision, let ``reducer`` sum between the
            hosts, and spread the result inside each host. With a single host, or a
            single rank on each, ``reducer`` sums over all ranks.

    Example:
        >>> from bagua.comm import solo_group
        >>> from bagua.compression import Identity
        >>> from bagua.primitives import AllGatherReducer
        >>> tensor, group, reducer = torch.ones(3), solo_group(), AllGatherReducer(Identity())
        >>> reducer_sum(tensor, group, reducer, reducer.memory(group.global_communicator, tensor))
        >>> tensor
        tensor([1., 1., 1.])
    """
    _between(tensor, group, lambda flat, ranks: reducer.reduce(flat, ranks, memory), hierarchical=hierarchical)
