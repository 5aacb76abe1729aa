"""The topologies that there are, and their names: graphs, ranks that meet in pairs, and hosts that mix with hosts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bagua.checks import check_kind
from bagua.errors import ConfigurationError
from bagua.topology.nodes import ranks_by_node
from bagua.topology.topology import Edge, Nodes, Round, Topology


class _RegularGraph(Topology):
    """All ranks have as many neighbours, and give each of them and themselves the same weight."""

    static = True

    @abstractmethod
    def _neighbours(self, rank: int, size: int) -> set[int]: ...

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        around = [self._neighbours(rank, size) | {rank} for rank in range(size)]
        return Round.from_rows([dict.fromkeys(members, 1.0 / len(members)) for members in around])


@dataclass(frozen=True)
class Complete(Topology):
    """All ranks take the mean of all ranks. Consensus after one round.

    Example:
        >>> Complete().matrix(2).tolist()
        [[0.5, 0.5], [0.5, 0.5]]
    """

    static = True

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        return Round.from_edges(size, [Edge(tuple(range(size)), 1.0 / size)])


@dataclass(frozen=True)
class Ring(_RegularGraph):
    """Each rank takes a third of both neighbours; two ranks take half of each other.

    Spectral gap ``2/3 (1 - cos(2 pi / n))``.

    Example:
        >>> Ring().round(5, 1)[0].sources
        ((1, 0.3333333333333333), (4, 0.3333333333333333))
    """

    def _neighbours(self, rank: int, size: int) -> set[int]:
        return {(rank - 1) % size, (rank + 1) % size}


@dataclass(frozen=True)
class Torus(_RegularGraph):
    """A grid, as square as can be, whose opposite sides touch; four neighbours, each of weight 1/5.

    A prime number of ranks is a ring.

    Example:
        >>> [rank for rank, _ in Torus().round(9, 1)[0].sources]
        [1, 2, 3, 6]
    """

    def _neighbours(self, rank: int, size: int) -> set[int]:
        rows = max(count for count in range(1, math.isqrt(size) + 1) if size % count == 0)
        columns = size // rows
        row, column = divmod(rank, columns)
        vertical = {(row + shift) % rows * columns + column for shift in (-1, 1)}
        return vertical | {row * columns + (column + shift) % columns for shift in (-1, 1)}


@dataclass(frozen=True)
class AlternatingRing(Topology):
    """On a ring, each rank meets its right and its left neighbour in turns. Of an odd number one rests, in turns.

    Example:
        >>> [[edge.ranks for edge in AlternatingRing().round(4, step).edges] for step in (1, 2)]
        [[(0, 1), (2, 3)], [(0, 3), (1, 2)]]
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """Two rounds, or one for each rank of an odd number."""
        return size if size % 2 else min(size, 2)

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        ring = [(rank + step - 1) % size for rank in range(size)]
        return Round.matching(size, _pairs(ring))


@dataclass(frozen=True)
class ShiftOne(Topology):
    """Each rank of the first half meets all ranks of the second half, one after the other.

    In round ``k`` (from 1), with ``h = n / 2``, rank ``r < h`` meets ``h + (k - 1 + r) mod h``.
    Of an odd number one rank rests in each round, in turns.

    Example:
        >>> [[edge.ranks for edge in ShiftOne().round(4, step).edges] for step in (1, 2)]
        [[(0, 2), (1, 3)], [(0, 3), (1, 2)]]
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """As many rounds as the half has ranks."""
        return (size + 1) // 2

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        half = (size + 1) // 2
        met = ((rank, half + (step - 1 + rank) % half) for rank in range(half))
        return Round.matching(size, [(rank, other) for rank, other in met if other < size])


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In round ``k`` each rank meets one at distance ``2^i``, ``i = (k - 1) mod ceil(log2 n)``.

    On ``2^d`` ranks, consensus is exact after any ``d`` rounds in a row. On other sizes a
    rank may rest, another one in each cycle of rounds.

    Example:
        >>> [[edge.ranks for edge in OnePeerExponential().round(4, step).edges] for step in (1, 2)]
        [[(0, 1), (2, 3)], [(0, 2), (1, 3)]]

    Paper: Ying et al., Exponential graph is provably efficient for decentralized deep training, 2021.
    """

    def period(self, size: int, nodes: Nodes | None = None) -> int:
        """``log2 n`` rounds for a power of two; longer if ranks take turns in resting."""
        return _powers(size) * (math.lcm(2, size) if size & (size - 1) else 1)

    def _round(self, size: int, step: int, nodes: tuple[int, ...]) -> Round:
        cycle, power = divmod(step - 1, _powers(size))
        distance = 1 << power
        shift = cycle if size & (size - 1) else 0
        circles = math.gcd(size, distance)
        pairs: list[tuple[int, int]] = []
        for first in range(circles):
            length = size // circles
            pairs += _pairs([(first + (shift + position) * distance) % size for position in range(length)])
        return Round.matching(size, pairs)


def _pairs(ranks: list[int]) -> list[tuple[int, int]]:
    """Neighbours in the list, two by two; of an odd number the last one is left over."""
    return list(zip(ranks[::2], ranks[1::2], strict=False))


def _powers(size: int) -> int:
    """How many powers of two are smaller than ``size``; at least one, so that one rank has rounds, too."""
    return max((size - 1).bit_length(), 1)


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


#: Prefix of names that stand for the hierarchical form of another topology.
HIERARCHICAL = "hierarchical_"

_TOPOLOGIES: dict[str, type[Topology]] = {
    "alternating_exp_ring": AlternatingExponentialRing,
    "alternating_ring": AlternatingRing,
    "complete": Complete,
    "one_peer_exponential": OnePeerExponential,
    "ring": Ring,
    "shift_one": ShiftOne,
    "torus": Torus,
}
_ALIASES = {"all": "complete", "one_peer_exp": "one_peer_exponential"}


def create(name: str | Topology, argument: str = "topology") -> Topology:
    """The topology of a name.

    Args:
        name: a name, ``hierarchical_`` and a name, or a topology, which is returned.
        argument: name of the caller's argument, for the message.

    Raises:
        ConfigurationError: there is none of that name; the message names those that exist.

    Example:
        >>> create("one-peer-exp")
        OnePeerExponential()
        >>> create("hierarchical_ring")
        Hierarchical(between_hosts=Ring())
    """
    if isinstance(name, Topology):
        return name
    check_kind(str, "the name of a topology, or a Topology", **{argument: name})
    key = str(name).strip().lower().replace("-", "_")
    if key.startswith(HIERARCHICAL):
        return Hierarchical(create(key.removeprefix(HIERARCHICAL), argument))
    factory = _TOPOLOGIES.get(_ALIASES.get(key, key))
    if factory is None:
        raise ConfigurationError(
            "there is no topology of this name",
            argument=argument,
            expected=f"{' or '.join(available())}, or {HIERARCHICAL} and one of these",
            seen=repr(name),
            advice="Pass a topology of your own in place of a name.",
        )
    return factory()


def available() -> Iterator[str]:
    """All names, in alphabetical order."""
    return iter(sorted(_TOPOLOGIES))
