"""What programs do with the names of ``torch.distributed``, in ``bagua.distributed`` and in torch; wrong forms."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

import bagua.distributed as dist
from bagua import comm
from bagua.comm import NON_MEMBER, ReduceOp
from bagua.comm import torch_forms as lists
from bagua.comm.startup.adoption import communicator_of
from bagua.distributed import collectives, point_to_point
from tests.contract.exercises import CallSetting, Exercise, several, started
from tests.programs.mutants import Mutant, around, finished, patched
from tests.programs.native import Place, assert_same_object, own_object
from tests.versions import renamed

Begin = Callable[[Place, CallSetting], Exercise]


def _wait_later(s: CallSetting) -> bool:
    return bool(s.options.get("async_op"))


def _at(p: Place, s: CallSetting, name: str, rank: int) -> dict[str, Any]:
    """The argument that names ``rank`` of the group, as a global rank or as one in the group."""
    return {f"group_{name}": rank} if s.seed % 2 else {name: p.ranks[rank]}


def _all_reduce(p: Place, s: CallSetting) -> Exercise:
    inputs = s.of_each(p)
    tensor = s.place(inputs[p.rank], p)
    work = p.dist.all_reduce(tensor, s.op, p.group, _wait_later(s))
    return started("all_reduce", p, s, [work], [(tensor, inputs)], alike=True)


def _all_reduce_coalesced(p: Place, s: CallSetting) -> Exercise:
    """Torch takes one dtype in such a call, so all parts have the first one's."""
    inputs = [replace(part, dtype=s.dtype).of_each(p) for part in several(s)]
    tensors = [s.place(numbers[p.rank], p) for numbers in inputs]
    work = p.dist.all_reduce_coalesced(tensors, s.op, p.group, _wait_later(s))
    return started("all_reduce_coalesced", p, s, [work], zip(tensors, inputs, strict=True), alike=True)


def _reduce(p: Place, s: CallSetting) -> Exercise:
    inputs = s.of_each(p)
    tensor = s.place(inputs[p.rank], p)
    work = p.dist.reduce(tensor, op=s.op, group=p.group, async_op=_wait_later(s), **_at(p, s, "dst", s.root))
    expected = inputs if p.rank == s.root else None if p.spoils else inputs[p.rank]
    return started("reduce", p, s, [work], [(tensor, expected)])


def _broadcast(p: Place, s: CallSetting) -> Exercise:
    tensor = s.place(s.own(p.rank), p)
    work = p.dist.broadcast(tensor, group=p.group, async_op=_wait_later(s), **_at(p, s, "src", s.root))
    return started("broadcast", p, s, [work], [(tensor, s.own(s.root))], alike=True)


def _outputs(p: Place, s: CallSetting) -> list[torch.Tensor]:
    return [s.room(s.shape, p) for _ in range(p.size)]


def _all_gather(p: Place, s: CallSetting) -> Exercise:
    outputs, everything = _outputs(p, s), s.of_each(p)
    tensor = s.place(everything[p.rank], p)
    work = p.dist.all_gather(outputs, tensor, p.group, _wait_later(s))
    filled = zip(outputs, everything, strict=True)
    return started("all_gather", p, s, [work], filled, [(tensor, everything[p.rank])], alike=True)


def _rows(p: Place, s: CallSetting) -> tuple[int, ...]:
    """The shape of all shares, one below the other. Gloo takes no other one."""
    return (p.size * math.prod(s.shape[:1]), *s.shape[1:])


def _named(p: Place, s: CallSetting, name: str, before: str) -> Callable[..., Any]:
    """A function by its name since torch 2.13, or by its former one, which it has kept."""
    return renamed(p.dist, *((name, before) if s.seed % 2 else (before, name)))


def _all_gather_single(p: Place, s: CallSetting) -> Exercise:
    output, everything = s.room(_rows(p, s), p), s.of_each(p)
    tensor = s.place(everything[p.rank], p)
    call = _named(p, s, "all_gather_single", "all_gather_into_tensor")
    work = call(output, tensor, p.group, _wait_later(s))
    filled = [(output, torch.stack(everything).view(_rows(p, s)))]
    return started("all_gather_single", p, s, [work], filled, [(tensor, everything[p.rank])], alike=True)


def _gather(p: Place, s: CallSetting) -> Exercise:
    outputs, own = _outputs(p, s) if p.rank == s.root else None, s.own(p.rank)
    tensor = s.place(own, p)
    work = p.dist.gather(tensor, outputs, group=p.group, async_op=_wait_later(s), **_at(p, s, "dst", s.root))
    return started("gather", p, s, [work], zip(outputs or (), s.of_each(p), strict=False), [(tensor, own)])


def _parts(p: Place, s: CallSetting, rank: int) -> list[torch.Tensor]:
    """The numbers that ``rank`` has for each rank of the group."""
    return [replace(s, seed=s.seed + 100 * (1 + target)).own(rank) for target in range(p.size)]


def _placed(p: Place, s: CallSetting, numbers: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors with what is put in them."""
    return [(s.place(one, p), one) for one in numbers]


def _tensors(pairs: Iterable[tuple[torch.Tensor, Any]]) -> list[torch.Tensor]:
    return [tensor for tensor, _ in pairs]


def _scatter(p: Place, s: CallSetting) -> Exercise:
    numbers, output = _parts(p, s, s.root), s.room(s.shape, p)
    inputs = _placed(p, s, numbers if p.rank == s.root else [])
    given = _tensors(inputs) or None
    work = p.dist.scatter(output, given, group=p.group, async_op=_wait_later(s), **_at(p, s, "src", s.root))
    return started("scatter", p, s, [work], [(output, numbers[p.rank])], inputs)


def _reduce_scatter(p: Place, s: CallSetting) -> Exercise:
    inputs, output = _placed(p, s, _parts(p, s, p.rank)), s.room(s.shape, p)
    work = p.dist.reduce_scatter(output, _tensors(inputs), s.op, p.group, _wait_later(s))
    shares = [_parts(p, s, rank)[p.rank] for rank in range(p.size)]
    return started("reduce_scatter", p, s, [work], [(output, shares)], inputs)


def _reduce_scatter_single(p: Place, s: CallSetting) -> Exercise:
    own, output = s.own(p.rank, p.size).view(_rows(p, s)), s.room(s.shape, p)
    tensor = s.place(own, p)
    call = _named(p, s, "reduce_scatter_single", "reduce_scatter_tensor")
    work = call(output, tensor, s.op, p.group, _wait_later(s))
    shares = [numbers[p.rank] for numbers in s.of_each(p, p.size)]
    return started("reduce_scatter_single", p, s, [work], [(output, shares)], [(tensor, own)])


def _uneven(p: Place, s: CallSetting, source: int) -> list[torch.Tensor]:
    """What ``source`` has for each rank, in rows of two: 0 to 3 of them."""
    shapes = [((source + 2 * target + s.seed) % 4, 2) for target in range(p.size)]
    return [replace(s, shape=one, seed=s.seed + 100 * target).own(source) for target, one in enumerate(shapes, start=1)]


def _all_to_all(p: Place, s: CallSetting) -> Exercise:
    expected = [_uneven(p, s, source)[p.rank] for source in range(p.size)]
    outputs = [(s.room(tuple(one.shape), p), one) for one in expected]
    inputs = _placed(p, s, _uneven(p, s, p.rank))
    work = p.dist.all_to_all(_tensors(outputs), _tensors(inputs), p.group, _wait_later(s))
    return started("all_to_all", p, s, [work], outputs, inputs)


def _all_to_all_single(p: Place, s: CallSetting) -> Exercise:
    numbers, output = s.of_each(p, p.size), s.room((p.size, *s.shape), p)
    tensor = s.place(numbers[p.rank], p)
    work = p.dist.all_to_all_single(output, tensor, None, None, p.group, _wait_later(s))
    expected = torch.stack([sent[p.rank] for sent in numbers])
    return started("all_to_all_single", p, s, [work], [(output, expected)], [(tensor, numbers[p.rank])])


def _all_to_all_single_uneven(p: Place, s: CallSetting) -> Exercise:
    expected, own = [_uneven(p, s, source)[p.rank] for source in range(p.size)], _uneven(p, s, p.rank)
    received, sent = [len(one) for one in expected], [len(one) for one in own]
    tensor, output = s.place(torch.cat(own), p), s.room((sum(received), 2), p)
    work = p.dist.all_to_all_single(output, tensor, received, sent, p.group, _wait_later(s))
    return started("uneven", p, s, [work], [(output, torch.cat(expected))], [(tensor, torch.cat(own))])


def _line(p: Place, s: CallSetting, tags: tuple[int, int]) -> Exercise:
    """Each rank sends two messages to the next one, which asks for them in the order of ``tags``, backwards."""
    works: list[Any] = []
    inputs = _placed(p, s, [s.own(p.rank + 10 * number) for number in range(2)])
    outputs = [(s.room(s.shape, p), s.own(p.rank - 1 + 10 * number) if p.rank else None) for number in range(2)]
    backwards = (1, 0) if tags[0] != tags[1] else (0, 1)
    for number in backwards if p.rank else ():
        source = _at(p, s, "src", p.rank - 1)
        if _wait_later(s):
            works.append(p.dist.irecv(outputs[number][0], group=p.group, tag=tags[number], **source))
        else:
            found = p.dist.recv(outputs[number][0], group=p.group, tag=tags[number], **source)
            assert found == p.ranks[p.rank - 1], f"recv says that rank {found} has sent"
    for number in range(2 if p.rank < p.size - 1 else 0):
        target = _at(p, s, "dst", p.rank + 1)
        send = p.dist.isend if _wait_later(s) else p.dist.send
        works.append(send(inputs[number][0], group=p.group, tag=tags[number], **target))
    return started(f"messages with tags {tags}", p, s, works, outputs, inputs)


def _batch(p: Place, s: CallSetting) -> Exercise:
    """Around a ring, all messages at once, receives and sends in either order."""
    if p.size == 1:
        return started("batch_isend_irecv", p, s, [], [])
    own, output = s.own(p.rank), s.room(s.shape, p)
    tensor, before, after = s.place(own, p), (p.rank - 1) % p.size, (p.rank + 1) % p.size
    ops = [
        p.dist.P2POp(p.dist.isend, tensor, group=p.group, **_at(p, s, "peer", after)),
        p.dist.P2POp(p.dist.irecv, output, group=p.group, **_at(p, s, "peer", before)),
    ]
    works = p.dist.batch_isend_irecv(ops[:: -1 if s.seed % 3 else 1])
    for work in works:
        work.wait()
    return started("batch_isend_irecv", p, s, [], [(output, s.own(before))], [(tensor, own)])


def _of_objects(p: Place, found: list[Any] | None, expected: list[Any], what: str) -> Exercise:
    def check() -> None:
        if found is not None:
            assert_same_object(found, [None] * len(found) if p.outside else expected, what)

    return Exercise([], check, [], [])


def _all_gather_object(p: Place, s: CallSetting) -> Exercise:
    found = [None] * p.size
    p.dist.all_gather_object(found, own_object(s, p.rank), p.group)
    return _of_objects(p, found, [own_object(s, rank) for rank in range(p.size)], "all_gather_object")


def _broadcast_object_list(p: Place, s: CallSetting) -> Exercise:
    sent = [own_object(s, s.root), "and", own_object(s, s.root + 1)]
    found = list(sent) if p.rank == s.root and not p.outside else [None] * 3
    p.dist.broadcast_object_list(found, group=p.group, **_at(p, s, "src", s.root))
    return _of_objects(p, found, sent, "broadcast_object_list")


def _gather_object(p: Place, s: CallSetting) -> Exercise:
    found = [None] * p.size if p.rank == s.root else None
    p.dist.gather_object(own_object(s, p.rank), found, group=p.group, **_at(p, s, "dst", s.root))
    return _of_objects(p, found, [own_object(s, rank) for rank in range(p.size)], "gather_object")


def _scatter_object_list(p: Place, s: CallSetting) -> Exercise:
    found: list[Any] = [None]
    given = [own_object(s, rank) for rank in range(p.size)] if p.rank == s.root else None
    p.dist.scatter_object_list(found, given, group=p.group, **_at(p, s, "src", s.root))
    return _of_objects(p, found, [own_object(s, p.rank)], "scatter_object_list")


def _messages_of_objects(p: Place, s: CallSetting) -> Exercise:
    found, expected = [None, None], [None, None]
    if p.rank:
        source = p.dist.recv_object_list(found, group=p.group, **_at(p, s, "src", p.rank - 1))
        assert source == p.ranks[p.rank - 1], f"recv_object_list says that rank {source} has sent"
        expected = [own_object(s, p.rank - 1), "and"]
    if p.rank < p.size - 1:
        p.dist.send_object_list([own_object(s, p.rank), "and"], group=p.group, **_at(p, s, "dst", p.rank + 1))
    return _of_objects(p, found, expected, "recv_object_list")


#: Every kind of call with torch's names; ``barrier`` has an exercise of its own in programs.
MIRROR: dict[str, Begin] = {
    "all_reduce": _all_reduce, "all_reduce_coalesced": _all_reduce_coalesced, "reduce": _reduce,
    "reduce_scatter": _reduce_scatter, "reduce_scatter_single": _reduce_scatter_single, "broadcast": _broadcast,
    "all_gather": _all_gather, "all_gather_single": _all_gather_single, "gather": _gather, "scatter": _scatter,
    "all_to_all": _all_to_all, "all_to_all_single": _all_to_all_single,
    "all_to_all_single_uneven": _all_to_all_single_uneven, "messages": lambda p, s: _line(p, s, (0, 0)),
    "messages_with_tags": lambda p, s: _line(p, s, (7, 3)), "batch_isend_irecv": _batch,
    "all_gather_object": _all_gather_object, "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object, "scatter_object_list": _scatter_object_list,
    "messages_of_objects": _messages_of_objects,
}  # fmt: skip
REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")


def _everywhere(name: str, value: Any) -> Mutant:
    """A helper that several modules have imported."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        for place in (collectives, point_to_point):
            patch.setattr(place, name, value)

    return apply


def _passes(module: Any, name: str, place: int, change: Callable[[Any], Any], key: str = "") -> Mutant:
    """Another argument is passed: of the name ``key``, or else at this place."""

    def call(true: Any, *arguments: Any, **options: Any) -> Any:
        if key in options:
            return true(*arguments, **{**options, key: change(options[key])})
        return true(*arguments[:place], change(arguments[place]), *arguments[place + 1 :], **options)

    return around(module, name, call)


def _among_all(name: str, place: int) -> Mutant:
    return _passes(dist, name, place, lambda _: None, "group")


def _backwards(name: str, place: int) -> Mutant:
    """A list of one tensor for each rank is taken from its end."""
    return _passes(comm, name, place, lambda found: found and found[::-1])


def _turns(place: Any, name: str, argument: int) -> Mutant:
    """A list of objects is turned around after the call."""

    def call(true: Any, *arguments: Any, **options: Any) -> Any:
        result = true(*arguments, **options)
        if arguments[argument]:
            arguments[argument].reverse()
        return result

    return around(place, name, call)


def _as_global_rank(communicator: Any, rank: Any, group_rank: Any, *rest: Any) -> int:
    wanted = rank if group_rank is None else group_rank
    return communicator.ranks.index(wanted) if wanted in communicator.ranks else wanted % communicator.size


def _all_but_first_row(true: Any, output: Any, *arguments: Any) -> Any:
    work = true(output, *arguments)
    if work is None and output.numel() and len(arguments) > 1:
        output.detach()[0] = 0
    return work


def _as_the_group_counts(name: str) -> Mutant:
    """The rank that is returned is the one in the group."""

    def call(true: Any, *arguments: Any, **options: Any) -> Any:
        found = true(*arguments, **options)
        communicator = communicator_of(options.get("group"))
        return communicator.ranks.index(found) if communicator else found

    return around(dist, name, call)


def _all_one_tag(patch: pytest.MonkeyPatch) -> None:
    for name in ("send", "receive"):
        around(lists.Mail, name, lambda true, mail, tensor, other, tag: true(mail, tensor, other, 1))(patch)


def _waits_and_returns_none(true: Any, communicator: Any, work: Any, outputs: Any, **options: Any) -> Any:
    if work is not None:
        work.wait()


def _waits_for_nothing(true: Any, communicator: Any, work: Any, outputs: Any, **options: Any) -> Any:
    return true(communicator, None, outputs, complete=work is not None or bool(options))


def _forgets_lists(true: Any, work: Any, finish: Callable[[], None]) -> Any:
    if work is None:
        finish()
    return work


def _keeps_the_last(true: Any, object_list: list[Any], *arguments: Any, **options: Any) -> Any:
    last = object_list[-1]
    result = true(object_list, *arguments, **options)
    object_list[-1] = last
    return result


def _sends_only(true: Any, ops: Any) -> Any:
    works = true(ops)
    for op in ops:
        if op.op is dist.irecv:
            op.tensor.detach().view(torch.uint8).zero_() if op.tensor.is_contiguous() and op.tensor.dim() else None
    return works


MIRROR_MUTANTS: dict[str, Mutant] = {
    **{
        f"{name} always adds": _passes(
            dist, name, 1 if name.startswith("all_reduce") else 2, lambda _: ReduceOp.SUM, "op"
        )
        for name in REDUCING
    },
    "global ranks are taken for ranks in the group": _everywhere(
        "rank_inside", lambda ranks, one, inside, *_: (one if inside is None else inside) % ranks.size
    ),
    "ranks in the group are taken for global ones": _everywhere("rank_inside", _as_global_rank),
    "a rank that is no member calls among all": _everywhere(
        "communicator_of", lambda group: communicator_of(None if group is NON_MEMBER else group)
    ),
    "all_reduce is among all": _among_all("all_reduce", 2),
    "all_gather is among all": _among_all("all_gather", 2),
    "all_to_all is among all": _among_all("all_to_all", 2),
    "broadcast is among all": _among_all("broadcast", 2),
    "barrier is among all": _among_all("barrier", 0),
    "barrier does not wait": patched(dist, "barrier", lambda group, async_op: finished(None) if async_op else None),
    "all_gather fills its list backwards": _backwards("allgather_tensors", 1),
    "gather fills its list backwards": _backwards("gather_tensors", 2),
    "scatter takes its list backwards": _backwards("scatter_tensors", 2),
    "reduce_scatter takes its list backwards": _backwards("reduce_scatter_tensors", 2),
    "all_to_all takes its list backwards": _backwards("alltoall_tensors", 2),
    "all_to_all_single swaps its sizes": around(
        comm, "alltoall_rows", lambda true, ranks, out, data, to, of, **more: true(ranks, out, data, of, to, **more)
    ),
    "all_gather_single loses its first row": around(dist, "all_gather_single", _all_but_first_row),
    "asynchronous calls return nothing": around(collectives, "as_in_torch", _waits_and_returns_none),
    "synchronous calls return a work": around(
        collectives, "as_in_torch", lambda true, ranks, work, outputs, **_: true(ranks, work, outputs, complete=True)
    ),
    "a work of a collective does not wait": around(collectives, "as_in_torch", _waits_for_nothing),
    "a work of a message does not wait": around(point_to_point, "as_in_torch", _waits_for_nothing),
    "lists are not filled when a work is complete": around(lists, "followed", _forgets_lists),
    "recv returns the rank in the group": _as_the_group_counts("recv"),
    "recv_object_list returns the rank in the group": _as_the_group_counts("recv_object_list"),
    "all tags are one": _all_one_tag,
    "a batch loses what it receives": around(dist, "batch_isend_irecv", _sends_only),
    "all_gather_object fills its list backwards": _turns(dist, "all_gather_object", 0),
    "gather_object fills its list backwards": _turns(dist, "gather_object", 1),
    "broadcast_object_list turns its list around": _turns(dist, "broadcast_object_list", 0),
    "broadcast_object_list keeps the last object": around(dist, "broadcast_object_list", _keeps_the_last),
    "recv_object_list turns its list around": _turns(dist, "recv_object_list", 0),
    "scatter_object_list gives all the first object": around(
        dist, "scatter_object_list", lambda true, found, given, **o: true(found, given and [given[0]] * len(given), **o)
    ),
}
