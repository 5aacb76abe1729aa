"""Where a call of a program is made, and what programs do with the methods of a communicator."""

import itertools
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

import bagua.comm
import bagua.distributed
from bagua.comm import NON_MEMBER, Communicator, ProcessGroup
from tests.contract.exercises import EXERCISES, REDUCED, Begin, CallSetting, Exercise, assert_same, values

#: What a program describes of a place: the kind of group, and its ranks or, for groups of hosts, their sizes.
Description = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """A group, as one of its members sees it, or a rank that is not a member."""

    dist: ModuleType  # with torch's names, through which calls are made
    group: Any  # what is passed there as ``group``
    communicator: Any  # on which bagua's methods are called; None for groups of torch
    ranks: tuple[int, ...]  # global ranks of the members
    rank: int  # of this process among them; an outsider does as if it were the first
    outside: bool  # this process is no member
    device_types: frozenset[str] = frozenset({"cpu"})  # on which tensors may be
    spoils: bool = False  # ``reduce`` changes the tensors of all ranks, as it does on Gloo of torch

    @property
    def size(self) -> int:
        return len(self.ranks)


def places_of_bagua(descriptions: tuple[Description, ...]) -> list[Place]:
    """The groups that a program describes; collective. Groups are named in each form that is taken."""
    world = bagua.comm.get_default_group()
    return [_place_of_bagua(world, kind, ranks) for kind, ranks in descriptions]


def _place_of_bagua(world: ProcessGroup, kind: str, numbers: tuple[int, ...]) -> Place:
    ends = list(itertools.accumulate(numbers))
    hosts = [tuple(range(end - count, end)) for end, count in zip(ends, numbers, strict=True)]
    group, ranks, communicator = None, tuple(range(world.size)), world.global_communicator
    if kind == "duplicate":
        group = world.duplicate()
        communicator = group.global_communicator
    elif kind == "some":
        group, ranks = bagua.comm.new_group(numbers), numbers
        communicator = group.global_communicator
    elif kind == "within":
        group = communicator = world.intra_node_communicator
        ranks = next(host for host in hosts if world.rank in host)
    elif kind == "between":
        group = communicator = world.inter_node_communicator or NON_MEMBER
        ranks = tuple(host[0] for host in hosts)
    if not communicator:
        return Place(bagua.distributed, NON_MEMBER, NON_MEMBER, ranks, 0, outside=True)
    assert communicator.ranks == ranks, f"a group of {ranks} has the ranks {communicator.ranks}"
    types = communicator.device_types
    return Place(bagua.distributed, group, communicator, ranks, communicator.rank, outside=False, device_types=types)


def places_of_torch(dist: ModuleType, descriptions: tuple[Description, ...]) -> list[Place]:
    """The same for ``torch.distributed``, on any backend: all ranks, and groups of some."""
    places = []
    for kind, ranks in descriptions:
        members = tuple(range(dist.get_world_size())) if kind == "world" else ranks
        group = None if kind == "world" else dist.new_group(list(ranks))
        outside = dist.get_rank() not in members
        rank = 0 if outside else members.index(dist.get_rank())
        places.append(Place(dist, group, None, members, rank, outside, spoils=dist.get_backend() == "gloo"))
    return places


def own_object(s: CallSetting, rank: int) -> dict[str, Any]:
    """An object that differs in size and content from rank to rank."""
    name = "rank" * (1 + (rank + s.seed) % 3) + str(rank)
    return {"name": name, "numbers": s.own(rank), "more": (rank, [None, rank / 3, b"\0" * rank], {True: "x"})}


def assert_same_object(actual: Any, expected: Any, message: str) -> None:
    """Fail unless two objects are equal in all their parts and the types of these."""
    assert type(actual) is type(expected), f"{message}: {actual!r} instead of {expected!r}"
    if isinstance(expected, torch.Tensor):
        assert_same(actual, expected, message)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), message
        for key, part in expected.items():
            assert_same_object(actual[key], part, message)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{message}: {actual!r} instead of {expected!r}"
        for one, other in zip(actual, expected, strict=True):
            assert_same_object(one, other, message)
    else:
        assert actual == expected, f"{message}: {actual!r} instead of {expected!r}"


def _objects(kind: str) -> Begin:
    """A collective on objects: what it is called with, and what it shall give."""

    def begin(comm: Communicator, s: CallSetting) -> Exercise:
        everyone = [own_object(s, rank) for rank in range(comm.size)]
        mine, at_root = everyone[comm.rank], everyone if comm.rank == s.root else None
        arguments, expected = {
            "broadcast_object": ((mine, s.root), everyone[s.root]),
            "allgather_object": ((mine,), everyone),
            "gather_object": ((mine, s.root), at_root),
            "scatter_object": ((at_root, s.root), mine),
        }[kind]
        return _of_objects(getattr(comm, kind)(*arguments, **s.options), expected, kind, s)

    return begin


def _of_objects(found: Any, expected: Any, kind: str, s: CallSetting) -> Exercise:
    """An exercise whose result is an object; a call returns a work for it, or the object itself."""
    works = [found] if s.options.get("async_op") else []

    def check() -> None:
        assert_same_object(found.result() if works else found, expected, kind)

    return Exercise(works, check, [], [])


def _messages_of_objects(comm: Communicator, s: CallSetting) -> Exercise:
    """From each even rank to the next one: two calls of a rank would have to wait for each other."""
    other = comm.rank ^ 1
    if other >= comm.size:
        return Exercise([], lambda: None, [], [])
    if comm.rank % 2:
        return _of_objects(comm.recv_object(other, **s.options), own_object(s, other), "recv_object", s)
    return _of_objects(comm.send_object(own_object(s, comm.rank), other, **s.options), None, "send_object", s)


def _overlapping(comm: Communicator, s: CallSetting) -> Exercise:
    """Output and input at drawn places of one plain buffer, whose dtype can be reduced; what is neither must stay."""
    s = replace(s, present=CallSetting.present, op=CallSetting.op)
    size, rank, share = comm.size, comm.rank, s.seed % 7
    kinds = ("allgather", "alltoall", "sendrecv", "gather", "scatter", "reduce_scatter")
    kind = kinds[s.seed % (6 if s.dtype in REDUCED else 5)]
    many = size * share
    into = many if kind in ("allgather", "alltoall", "gather") else share
    outof = many if kind in ("alltoall", "scatter", "reduce_scatter") else share
    buffers = [values((3 * many + 20,), s.dtype, 10 + s.seed + other) for other in range(size)]
    input_at, output_at = s.seed % 11, s.seed // 11
    inputs = [buffer[input_at : input_at + outof] for buffer in buffers]
    mine = s.place(buffers[rank], comm)
    output, tensor = mine[output_at : output_at + into], mine[input_at : input_at + outof]
    before, after = (rank - 1) % size, (rank + 1) % size
    ranks = {"sendrecv": (before, after), "gather": (s.root,), "scatter": (s.root,)}.get(kind, ())
    written = None if kind == "gather" and rank != s.root else output
    read = None if kind == "scatter" and rank != s.root else tensor
    work = getattr(comm, kind)(written, read, *ranks, **s.options)
    own = slice(rank * share, (rank + 1) * share)

    def check() -> None:
        expected = buffers[rank].clone()
        result = expected[output_at : output_at + into]
        if kind in ("allgather", "gather"):
            result.copy_(result if written is None else torch.cat(inputs))
        elif kind == "scatter":
            result.copy_(inputs[s.root][own])
        elif kind == "alltoall":
            result.copy_(torch.cat([sent[own] for sent in inputs]))
        elif kind == "sendrecv":
            result.copy_(inputs[before])
        else:
            s.assert_reduced(output, [numbers[own] for numbers in inputs], "reduce_scatter into its input")
            result.copy_(output.detach().cpu())
        assert_same(mine, expected, f"{kind} into its own input")

    return Exercise([work], check, [], [])


#: Every kind of call of a communicator; ``barrier`` has an exercise of its own in programs.
NATIVE: dict[str, Begin] = {
    **{kind: begin for kind, begin in EXERCISES.items() if kind != "barrier"},
    **{kind: _objects(kind) for kind in ("broadcast_object", "allgather_object", "gather_object", "scatter_object")},
    "messages_of_objects": _messages_of_objects,
    "overlapping": _overlapping,
}
REDUCING = ("allreduce", "reduce", "reduce_scatter", "allreduce_coalesced")
