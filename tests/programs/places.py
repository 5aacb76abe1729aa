"""Where a call of a program is made: on which of several communicators, through which names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import bagua.comm
import bagua.distributed
from bagua.comm import NON_MEMBER, ProcessGroup

#: What a program describes of a place: the kind of group, and its ranks or, for groups of hosts, their sizes.
Description = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """A group, as one of its members sees it, or a rank that is not a member.

    Attributes:
        dist: the module with torch's names through which calls are made.
        group: what is passed there as ``group``.
        communicator: on which bagua's methods are called; None for groups of torch.
        ranks: global ranks of the members.
        rank: of this process among them; an outsider does as if it were the first.
        outside: whether this process is no member.
        device_types: on which tensors may be.
    """

    dist: ModuleType
    group: Any
    communicator: Any
    ranks: tuple[int, ...]
    rank: int
    outside: bool
    device_types: frozenset[str] = frozenset({"cpu"})

    @property
    def size(self) -> int:
        return len(self.ranks)


def places_of_bagua(descriptions: tuple[Description, ...]) -> list[Place]:
    """The groups that a program describes; collective. Groups are named in each form that is taken."""
    world = bagua.comm.get_default_group()
    return [_place_of_bagua(world, kind, ranks) for kind, ranks in descriptions]


def _place_of_bagua(world: ProcessGroup, kind: str, numbers: tuple[int, ...]) -> Place:
    if kind == "world":
        return _inside(None, world.global_communicator, tuple(range(world.size)))
    if kind == "duplicate":
        group = world.duplicate()
        return _inside(group, group.global_communicator, tuple(range(world.size)))
    if kind == "some":
        group = bagua.comm.new_group(numbers)
        return _inside(group, group.global_communicator, numbers) if group else _outside(numbers)
    ends = list(itertools.accumulate(numbers))
    hosts = [tuple(range(end - count, end)) for end, count in zip(ends, numbers, strict=True)]
    if kind == "within":
        own = next(host for host in hosts if world.rank in host)
        return _inside(world.intra_node_communicator, world.intra_node_communicator, own)
    leaders, between = tuple(host[0] for host in hosts), world.inter_node_communicator
    return _inside(between, between, leaders) if between else _outside(leaders)


def _inside(group: Any, communicator: Any, ranks: tuple[int, ...]) -> Place:
    assert communicator.ranks == ranks, f"a group of {ranks} has the ranks {communicator.ranks}"
    return Place(
        bagua.distributed,
        group,
        communicator,
        ranks,
        communicator.rank,
        outside=False,
        device_types=communicator.device_types,
    )


def _outside(ranks: tuple[int, ...]) -> Place:
    return Place(bagua.distributed, NON_MEMBER, NON_MEMBER, ranks, 0, outside=True)


def places_of_torch(dist: ModuleType, descriptions: tuple[Description, ...]) -> list[Place]:
    """The same for ``torch.distributed``, whose backend may be ours: all ranks, and groups of some."""
    places = []
    for kind, ranks in descriptions:
        members = tuple(range(dist.get_world_size())) if kind == "world" else ranks
        group = None if kind == "world" else dist.new_group(list(ranks))
        outside = dist.get_rank() not in members
        rank = 0 if outside else members.index(dist.get_rank())
        places.append(Place(dist, group, None, members, rank, outside))
    return places
