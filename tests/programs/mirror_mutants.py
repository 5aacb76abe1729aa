"""Wrong forms of what ``bagua.distributed`` adds to a communicator: its names, with one mistake each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import bagua.distributed as dist
from bagua.comm import NON_MEMBER, ReduceOp
from bagua.comm.startup.adoption import communicator_of
from bagua.comm.torch_forms import lists
from bagua.distributed import collectives, point_to_point
from tests.programs.mutants import Mutant, around, patched

REDUCES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")


def _everywhere(name: str, value: Any) -> Mutant:
    """A helper that several modules have imported."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        for place in (collectives, point_to_point):
            patch.setattr(place, name, value)

    return apply


def _always_adds(name: str) -> Mutant:
    place = {"all_reduce": 1, "all_reduce_coalesced": 1, "reduce": -1}.get(name, 2)

    def add(true: Any, *arguments: Any, **options: Any) -> Any:
        if "op" in options:
            options["op"] = ReduceOp.SUM
        else:
            arguments = (*arguments[:place], ReduceOp.SUM, *arguments[place + 1 :])
        return true(*arguments, **options)

    return around(dist, name, add)


def _among_all(name: str, place: int | None) -> Mutant:
    """The group is left out; ``place`` says where it stands among the arguments, if it has no name."""

    def call(true: Any, *arguments: Any, **options: Any) -> Any:
        if place is None:
            return true(*arguments, **{**options, "group": None})
        return true(*arguments[:place], None, *arguments[place + 1 :], **options)

    return around(dist, name, call)


def _backwards(name: str, place: int) -> Mutant:
    """A list of one tensor for each rank is taken from its end."""

    def call(true: Any, *arguments: Any, **options: Any) -> Any:
        turned = arguments[place][::-1] if arguments[place] else arguments[place]
        return true(*arguments[:place], turned, *arguments[place + 1 :], **options)

    return around(collectives, name, call)


def _turns(place: Any, name: str, argument: int) -> Mutant:
    """A list of objects is turned around after the call."""

    def call(true: Any, *arguments: Any, **options: Any) -> Any:
        result = true(*arguments, **options)
        if arguments[argument]:
            arguments[argument].reverse()
        return result

    return around(place, name, call)


def _as_group_rank(communicator: Any, rank: Any, group_rank: Any, *rest: Any) -> int:
    return (rank if group_rank is None else group_rank) % communicator.size


def _as_global_rank(communicator: Any, rank: Any, group_rank: Any, *rest: Any) -> int:
    wanted = rank if group_rank is None else group_rank
    return communicator.ranks.index(wanted) if wanted in communicator.ranks else wanted % communicator.size


def _swaps_sizes(true: Any, communicator: Any, output: Any, tensor: Any, out: Any, given: Any, **options: Any) -> Any:
    return true(communicator, output, tensor, given, out, **options)


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


def _one_tag(true: Any, communicator: Any, tensor: Any, other: Any, tag: int) -> Any:
    return true(communicator, tensor, other, 1)


def _all_one_tag(patch: pytest.MonkeyPatch) -> None:
    around(point_to_point, "_send_tagged", _one_tag)(patch)
    around(point_to_point, "_receive_tagged", _one_tag)(patch)


def _waits_and_returns_none(true: Any, communicator: Any, work: Any, outputs: Any, **options: Any) -> Any:
    if work is not None:
        work.wait()


def _returns_work(true: Any, communicator: Any, work: Any, outputs: Any, **options: Any) -> Any:
    return true(communicator, work, outputs, complete=True)


def _waits_for_nothing(true: Any, communicator: Any, work: Any, outputs: Any, **options: Any) -> Any:
    return true(communicator, None, outputs, complete=work is not None or bool(options))


def _forgets_lists(true: Any, work: Any, finish: Callable[[], None]) -> Any:
    if work is None:
        finish()
    return work


class _Nothing:
    def wait(self) -> bool:
        return True


def _default_for_others(group: Any) -> Any:
    return communicator_of(None if group is NON_MEMBER else group)


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
    **{f"{name} always adds": _always_adds(name) for name in REDUCES},
    "global ranks are taken for ranks in the group": _everywhere("rank_inside", _as_group_rank),
    "ranks in the group are taken for global ones": _everywhere("rank_inside", _as_global_rank),
    "a rank that is no member calls among all": _everywhere("communicator_of", _default_for_others),
    "all_reduce is among all": _among_all("all_reduce", 2),
    "all_gather is among all": _among_all("all_gather", 2),
    "all_to_all is among all": _among_all("all_to_all", 2),
    "broadcast is among all": _among_all("broadcast", None),
    "barrier is among all": _among_all("barrier", 0),
    "barrier does not wait": patched(dist, "barrier", lambda group, async_op: _Nothing() if async_op else None),
    "all_gather fills its list backwards": _backwards("allgather_tensors", 1),
    "gather fills its list backwards": _backwards("gather_tensors", 2),
    "scatter takes its list backwards": _backwards("scatter_tensors", 2),
    "reduce_scatter takes its list backwards": _backwards("reduce_scatter_tensors", 2),
    "all_to_all takes its list backwards": _backwards("alltoall_tensors", 2),
    "all_to_all_single swaps its sizes": around(collectives, "alltoall_rows", _swaps_sizes),
    "all_gather_single loses its first row": around(dist, "all_gather_single", _all_but_first_row),
    "asynchronous calls return nothing": around(collectives, "as_in_torch", _waits_and_returns_none),
    "synchronous calls return a work": around(collectives, "as_in_torch", _returns_work),
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
        dist,
        "scatter_object_list",
        lambda true, found, given, **o: true(found, given and [given[0]] * len(given), **o),
    ),
}
