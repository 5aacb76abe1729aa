"""Topologies that look at hosts: ranks of one host agree, hosts mix with hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.checks import check_kind
from bagua.topology.graphs import OnePeerExponential
from bagua.topology.nodes import ranks_by_node
from bagua.topology.topology import Edge, Nodes, Round, Topology


def weighted_by_size(between_hosts: Round, sizes: Sequence[int]) -> Round:
    """Weights with which hosts of different size take each other's means, so that the mean over ranks is kept.

    An edge whose hosts would end with their common mean gets the mean over their ranks.
    Any other weight ``u`` between two hosts becomes ``u m / s``, with ``m`` the size of
    the smaller host of a symmetric round (of the smallest host of all otherwise) and ``s`` the size of the one that
    takes; a host keeps the rest.

    Args:
        between_hosts: doubly stochastic.
        sizes: ranks on each host.

    Returns:
        A round whose rows sum to 1, and whose matrix over ranks (see ``Hierarchical``) is
        doubly stochastic; symmetric if ``between_hosts`` is.

    Example:
        >>> weighted_by_size(Round.matching(2, [(0, 1)]), [1, 3]).matrix().tolist()
        [[0.25, 0.75], [0.25, 0.75]]
    """
    if len(set(sizes)) == 1:
        return between_hosts
    if means := _edges_that_are_means(between_hosts):
        rows: list[dict[int, float]] = [{} for _ in sizes]
        for edge in means:
            ranks = sum(sizes[host] for host in edge.ranks)
            for host in edge.ranks:
                rows[host] = {other: sizes[other] / ranks for other in edge.ranks}
        return Round.from_rows(rows)
    smallest = None if between_hosts.symmetric else min(sizes)
    rows = []
    for host, size in enumerate(sizes):
        sources = between_hosts[host].sources
        row = {other: weight * (smallest or min(size, sizes[other])) / size for other, weight in sources}
        row[host] = 1.0 - sum(row.values())
        rows.append(row)
    return Round.from_rows(rows)


def _over_ranks(between_hosts: Round, nodes: Nodes) -> Round:
    """The round over ranks in which each host mixes the means of hosts; these are numbered by their lowest rank."""
    hosts = ranks_by_node(nodes)
    if means := _edges_that_are_means(between_hosts):
        return Round.from_edges(len(nodes), [_union(hosts, edge.ranks) for edge in means])
    rows: list[dict[int, float]] = [{} for _ in nodes]
    for host, members in enumerate(hosts):
        around = between_hosts[host]
        weights = {host: around.own_weight, **dict(around.sources)}
        row = {rank: weight / len(hosts[other]) for other, weight in weights.items() for rank in hosts[other]}
        for rank in members:
            rows[rank] = row
    return Round.from_rows(rows)


@dataclass(frozen=True)
class Hierarchical(Topology):
    """The mean inside each host, then another topology between hosts; weighted by the hosts' sizes.

    Args:
        between_hosts: a topology whose ranks are hosts.

    Example:
        >>> from bagua.topology import Complete
        >>> Hierarchical(Complete()).round(3, 1, nodes=[0, 0, 1]).edges
        (Edge(ranks=(0, 1, 2), weight=0.3333333333333333),)
    """

    between_hosts: Topology

    def __post_init__(self) -> None:
        check_kind(Topology, "a Topology", between_hosts=self.between_hosts)

    @property
    def symmetric(self) -> bool:
        """As the topology between hosts."""
        return self.between_hosts.symmetric

    @property
    def static(self) -> bool:
        """As the topology between hosts."""
        return self.between_hosts.static

    def period(self, size: int, nodes: Nodes | None = None) -> int | None:
        """As the topology between hosts."""
        return self.between_hosts.period(size if nodes is None else len(set(nodes)))

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        hosts = ranks_by_node(nodes)
        mixing = self.between_hosts.round(len(hosts), step)
        if _edges_that_are_means(mixing):
            return _over_ranks(mixing, nodes)
        return _over_ranks(weighted_by_size(mixing, [len(members) for members in hosts]), nodes)


@dataclass(frozen=True)
class AlternatingExponentialRing(Topology):
    """Pairs of hosts at distances 1, 2, 4, ..., in turns with rounds inside each host.

    In two rounds a pair of hosts once takes the mean over both, and once each host takes
    the mean over itself. One pair begins with the first, the next with the second, so that
    the network is used evenly. One host alone takes its mean in every round.

    Example:
        >>> [edge.ranks for edge in AlternatingExponentialRing().round(4, 1, nodes=[0, 0, 1, 1]).edges]
        [(0, 1), (2, 3)]
        >>> [edge.ranks for edge in AlternatingExponentialRing().round(4, 2, nodes=[0, 0, 1, 1]).edges]
        [(0, 1, 2, 3)]

    Paper: Wang et al., From promise to practice: realizing high-performance decentralized training, 2025.
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """Twice that of the pairs of hosts, and twice again where pairs change turns."""
        return 4 * OnePeerExponential().period(size if nodes is None else len(set(nodes)))

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        hosts = ranks_by_node(nodes)
        turn, second = divmod(step - 1, 2)
        mixing = OnePeerExponential().round(len(hosts), turn + 1)
        assert mixing.edges is not None
        pairs = [edge.ranks for edge in mixing.edges]
        edges = []
        for number, pair in enumerate(pairs, start=turn * (len(hosts) // 2)):
            if len(pair) == 2 and number % 2 != second:
                edges.append(_union(hosts, pair))
            else:
                edges += [_union(hosts, (host,)) for host in pair]
        return Round.from_edges(size, edges)


def _edges_that_are_means(round_: Round) -> tuple[Edge, ...]:
    """All edges of a round, if the hosts of each end with their common mean; none otherwise."""
    return round_.edges if round_.edges is not None and all(edge.is_mean for edge in round_.edges) else ()


def _union(hosts: Sequence[Sequence[int]], which: Sequence[int]) -> Edge:
    ranks = tuple(sorted(rank for host in which for rank in hosts[host]))
    return Edge(ranks, 1.0 / len(ranks))
