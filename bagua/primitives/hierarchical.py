"""Operations that treat the ranks of one host and the hosts themselves differently."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.comm import Communicator, ProcessGroup


def has_two_levels(group: ProcessGroup) -> bool:
    """Whether hosts matter: not when there is one, or one rank on each.

    Example:
        >>> from bagua.comm import solo_group
        >>> has_two_levels(solo_group())
        False
    """
    return len(group.node_sizes) > 1 and max(group.node_sizes) > 1


def on_leaders(
    tensor: torch.Tensor, group: ProcessGroup, between_hosts: Callable[[torch.Tensor, Communicator], object]
) -> None:
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


def through_leaders(
    tensor: torch.Tensor, group: ProcessGroup, between_hosts: Callable[[torch.Tensor, Communicator], object]
) -> None:
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

    def sum_over_hosts(total: torch.Tensor, leaders: Communicator) -> None:
        leaders.allreduce(total)

    on_leaders(tensor, group, sum_over_hosts)
