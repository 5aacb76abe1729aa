"""What one rank does in each round of a topology, and the communicators of edges that need one of their own."""

from __future__ import annotations

from collections.abc import Sequence

from bagua import env
from bagua.comm import Communicator, ProcessGroup, get_world_size
from bagua.errors import ConfigurationError
from bagua.topology import (
    AlternatingRing,
    Neighbours,
    Round,
    Topology,
    check_round,
    create,
    ranks_by_node,
)

#: So many rounds are compared between ranks, and looked at to see what kind they are.
_FIRST_ROUNDS = 16


def resolve_topology(topology: str | Topology) -> Topology:
    """The topology that the documented argument means: its ``ring`` is the one whose ranks meet in pairs.

    Raises:
        ConfigurationError: there is none of that name.

    Example:
        >>> resolve_topology("ring"), resolve_topology("one-peer-exp")
        (AlternatingRing(), OnePeerExponential())
    """
    means_pairs = isinstance(topology, str) and topology.strip().lower() == "ring"
    return AlternatingRing() if means_pairs else create(topology)


def nodes_for(group: ProcessGroup, local_world_size: object) -> tuple[int, ...]:
    """Index of the host of each rank: as found, or hosts of ``local_world_size`` ranks each. Collective.

    Args:
        group: the ranks.
        local_world_size: a number; None for that of the launcher, if all ranks of the world have the same, and
            otherwise for what was found.

    Raises:
        ConfigurationError: the ranks cannot be dealt out to such hosts.
    """
    launchers = _launchers(group)  # On all ranks, also on those that were given another argument than others.
    if local_world_size is None:
        local_world_size = launchers
    if local_world_size is None:
        return tuple(group.nodes)
    if type(local_world_size) is not int or local_world_size < 1 or group.size % local_world_size:
        raise ConfigurationError(
            "ranks cannot be dealt out to hosts like this",
            argument="_local_world_size",
            expected=f"a divisor of {group.size}, or None",
            seen=repr(local_world_size),
        )
    return tuple(rank // local_world_size for rank in range(group.size))


def _launchers(group: ProcessGroup) -> int | None:
    """Ranks on each host as the launcher says, if it says so on all ranks of the world alike."""
    if group.size == 1:
        return None
    said = set(group.global_communicator.allgather_object(env.get_local_world_size()))
    count = said.pop()
    if said or not count or group.size % count or group.size != get_world_size():
        return None
    whole: int = count
    return whole


class RankRounds:
    """The rounds of a topology, as one rank sees them.

    Args:
        topology: who mixes with whom.
        size: number of ranks.
        rank: this one.
        nodes: index of the host of each rank.

    Attributes:
        topology: as given.
        by_neighbours: True if some round sends to each neighbour apart, instead of to one peer or in one allreduce.

    Raises:
        ConfigurationError: the topology does not exist for these ranks, or does not keep
            their mean.
    """

    def __init__(self, topology: Topology, size: int, rank: int, nodes: Sequence[int]) -> None:
        topology.check(size, nodes, rounds=_FIRST_ROUNDS)
        self.topology = topology
        self._size = size
        self._rank = rank
        self._nodes = tuple(nodes)
        self._period = topology.period(size, nodes)
        self._known: dict[int, tuple[Round, Neighbours]] = {}
        self._communicators: dict[tuple[int, ...], Communicator] = {}
        rounds = [self._round(number) for number in self._first_rounds()]
        self.by_neighbours = any(
            one.edges is None or (self._period is None and any(len(edge.ranks) > 2 for edge in one.edges))
            for one in rounds
        )

    def _first_rounds(self) -> range:
        return range(1, 1 + min(self._period or _FIRST_ROUNDS, _FIRST_ROUNDS))

    def _round(self, number: int) -> Round:
        return self.topology.round(self._size, number, self._nodes)

    def at(self, number: int) -> Neighbours:
        """What this rank does in the mix ``number``, counted from 1."""
        return self._look_up(number)[1]

    def round(self, number: int) -> Round:
        """What all ranks do in the mix ``number``, counted from 1."""
        return self._look_up(number)[0]

    def _look_up(self, number: int) -> tuple[Round, Neighbours]:
        key = number if self._period is None else (number - 1) % self._period + 1
        if key not in self._known:
            found = self._round(key)
            if self._period is None:  # It may be a function of the user's: only the first rounds have been looked at.
                check_round(found, size=self._size, symmetric=self.topology.symmetric, name=repr(self.topology))
                self._known.clear()
            self._known[key] = found, found[self._rank]
        return self._known[key]

    @property
    def facts(self) -> list[str]:
        """The first rounds, in words that are equal on ranks with equal rounds."""
        rounds = [(number, self._round(number)) for number in self._first_rounds()]
        return [f"round {number}: {one.rows if one.edges is None else one.edges}" for number, one in rounds]

    def connect(self, group: ProcessGroup) -> None:
        """Make the communicators of edges of three and more ranks, once for each set of ranks. Collective.

        A topology that never repeats could have any number of such edges, so it gets none: its
        larger edges exchange with each neighbour apart.

        Args:
            group: private to the model.
        """
        local = {tuple(members) for members in ranks_by_node(group.nodes)}
        everyone = tuple(range(group.size))
        for ranks in self._large_edges():
            if ranks == everyone:
                self._communicators[ranks] = group.global_communicator
            elif ranks in local:
                if group.rank in ranks:
                    self._communicators[ranks] = group.intra_node_communicator
            else:
                edge = group.subgroup(ranks, label="edge")
                if edge:
                    self._communicators[ranks] = edge.global_communicator

    def _large_edges(self) -> list[tuple[int, ...]]:
        """In the order in which rounds need them, which is the same on all ranks."""
        found: dict[tuple[int, ...], None] = {}
        for number in range(1, 1 + (self._period or 0)):
            for edge in self._round(number).edges or ():
                if len(edge.ranks) > 2:
                    found[edge.ranks] = None
        return list(found)

    def communicator(self, neighbours: Neighbours) -> Communicator | None:
        """The communicator of all ranks of this rank's edge, if it has one of its own."""
        return None if neighbours.edge is None else self._communicators.get(neighbours.edge.ranks)

    def __repr__(self) -> str:
        return f"{self.topology!r} on {self._size} ranks"
