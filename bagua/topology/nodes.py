"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_by_node(nodes: Sequence[int]) -> list[list[int]]:
    """Ranks on each host in ascending order; hosts in the order of their lowest rank.

    Args:
        nodes: index of the host of each rank.

    Example:
        >>> ranks_by_node((0, 1, 0))
        [[0, 2], [1]]
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    return list(members.values())
