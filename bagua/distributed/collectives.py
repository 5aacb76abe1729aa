"""Collectives on tensors and on objects, with the names, arguments and meaning of ``torch.distributed``.

Torch pickles objects. These functions do so only with ``allow_pickle=True``, on all ranks: unpickling runs what
the others send. Without it they take numbers, strings, bytes, tensors, and containers of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from torch import Tensor

from bagua import comm
from bagua.checks import refuse, renaming
from bagua.comm import Communicator, Group, NonMember, ReduceOp, TorchWork, Work, communicator_of, is_scaled
from bagua.errors import ConfigurationError, InvalidRankError

__all__ = [
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_tensor", "scatter", "scatter_object_list",
]  # fmt: skip

#: Where callbacks of futures of a communicator run; the thread starts with the first of them.
_callback_threads: weakref.WeakKeyDictionary[Communicator, comm.CallbackThread] = weakref.WeakKeyDictionary()


def rank_inside(
    communicator: Communicator, rank: int | None, group_rank: int | None, argument: str, default: int | None = None
) -> int:
    """The rank in ``communicator`` that a global rank, or a rank in the group, names.

    Args:
        communicator: communicator of the group.
        rank: a global rank, or None.
        group_rank: a rank in the group, or None.
        argument: name of ``rank``; that of ``group_rank`` has ``group_`` before it.
        default: global rank that is meant if none is given; None if one must be.

    Raises:
        ConfigurationError: both are given, or none.
        InvalidRankError: ``rank`` is not a member.
    """
    if group_rank is not None:
        if rank is not None:
            raise _not_one(argument, f"{rank} and {group_rank}")
        return group_rank
    rank = default if rank is None else rank
    if rank is None:
        raise _not_one(argument, "none of them")
    ranks = communicator.ranks
    if type(rank) is int and 0 <= rank < len(ranks) and ranks[rank] == rank:
        return rank
    if type(rank) is not int or rank not in ranks:
        raise InvalidRankError(
            "not a member of the group",
            argument=argument,
            expected=f"a global rank, one of {list(ranks)}",
            seen=repr(rank),
            advice=f"Ranks in the group are what group_{argument} takes.",
        )
    return ranks.index(rank)


def _not_one(argument: str, seen: str) -> ConfigurationError:
    return ConfigurationError(
        "a rank is named once, among all ranks or in the group",
        argument=argument,
        expected=f"one of {argument} and group_{argument}",
        seen=seen,
    )


def as_in_torch(
    communicator: Communicator | NonMember, work: Work | None, outputs: Sequence[Tensor], *, complete: bool = False
) -> TorchWork | None:
    """``work`` with the methods and results of torch's works; None if the call was not asynchronous.

    Args:
        communicator: on which the call was made.
        work: the call, or None.
        outputs: the tensors that receive its result.
        complete: True if no ``work`` means a call that is complete.
    """
    if isinstance(communicator, NonMember) or (work is None and not complete):
        return None
    found = _callback_threads.get(communicator)
    if found is None:
        found = _callback_threads.setdefault(communicator, comm.CallbackThread(f"bagua-{communicator.label}-callbacks"))
        weakref.finalize(communicator, found.stop, 0.0)
    return TorchWork(work, outputs, found)


#: The type of operations that are names only.
_NAMED = type(ReduceOp.SUM)


def _in_place(communicator: Communicator | NonMember, op: Any, tensors: Sequence[Tensor]) -> Any:
    """``op``; for PREMUL_SUM the tensors are multiplied here, and SUM is left."""
    if not is_scaled(op):
        return op
    if communicator:
        comm.scale(op, tensors)
    return ReduceOp.SUM


def _of_copies(op: Any, tensors: list[Tensor]) -> tuple[Any, list[Tensor]]:
    """``op`` and ``tensors``; for PREMUL_SUM they are SUM and multiplied copies."""
    return (ReduceOp.SUM, comm.scaled(op, tensors)) if is_scaled(op) else (op, tensors)


class _Named(NamedTuple):
    """A rank in the words of torch: see ``rank_inside``."""

    rank: int | None
    group_rank: int | None
    argument: str
    default: int | None = None


def _call(
    group: Group | None, async_op: bool, outputs: Sequence[Tensor], call: Callable[..., Work | None], *arguments: Any
) -> TorchWork | None:
    """Make ``call`` on the communicator of ``group``, with the ranks in it that are named among ``arguments``."""
    communicator = communicator_of(group)
    if not communicator:
        return None
    inside = [rank_inside(communicator, *one) if type(one) is _Named else one for one in arguments]
    return as_in_torch(communicator, call(communicator, *inside, async_op=async_op), outputs)


def all_reduce(
    tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: Group | None = None, async_op: bool = False
) -> TorchWork | None:
    """Reduce ``tensor`` over all ranks, in place. Unlike torch's: AVG of integers and MIN of complex are refused."""
    communicator = communicator_of(group)
    if type(op) is not _NAMED:  # The common case is decided here, quickly.
        op = _in_place(communicator, op, [tensor])
    work = communicator.allreduce(tensor, op, async_op=async_op)
    return None if work is None else as_in_torch(communicator, work, [tensor])


def all_reduce_coalesced(
    tensors: Tensor | Sequence[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce each tensor, in place; asynchronously a future, as in torch. Unlike there, dtypes may differ."""
    each = [tensors] if isinstance(tensors, Tensor) else tensors
    communicator = communicator_of(group)
    op = _in_place(communicator, op, each)
    work = as_in_torch(communicator, communicator.allreduce_coalesced(each, op, async_op=async_op), each)
    return None if work is None else work.get_future()


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> TorchWork | None:
    """Reduce ``tensor`` over all ranks into that of ``dst``. Others keep theirs; torch on Gloo spoils them."""
    communicator = communicator_of(group)
    if not communicator:
        return None
    inside = rank_inside(communicator, dst, group_dst, "dst")
    if inside == communicator.rank:
        op = _in_place(communicator, op, [tensor])
    else:
        op, (tensor,) = _of_copies(op, [tensor])
    return as_in_torch(communicator, communicator.reduce(tensor, inside, op, async_op=async_op), [tensor])


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> TorchWork | None:
    """Copy ``tensor`` of ``src`` into that of all others. As torch's."""
    return _call(group, async_op, [tensor], Communicator.broadcast, tensor, _Named(src, group_src, "src"))


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> TorchWork | None:
    """Gather ``tensor`` of all ranks into ``tensor_list``. As torch's on Gloo: all are equal in size."""
    return _call(group, async_op, tensor_list, comm.allgather_tensors, tensor_list, tensor)


@renaming(output="output_tensor", tensor="input_tensor")
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> TorchWork | None:
    """Gather ``input_tensor`` of all ranks into one output, concatenated or stacked. As torch's."""
    return _call(group, async_op, [output_tensor], Communicator.allgather, output_tensor, input_tensor)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> TorchWork | None:
    """Gather ``tensor`` of all ranks into ``gather_list`` on ``dst``, by default rank 0 of all. As torch's."""
    named = _Named(dst, group_dst, "dst", 0)
    return _call(group, async_op, gather_list or [], comm.gather_tensors, tensor, gather_list, named)


@renaming(output="tensor")
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Group | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> TorchWork | None:
    """Give each rank its tensor of ``scatter_list`` of ``src``, by default rank 0 of all. As torch's."""
    named = _Named(src, group_src, "src", 0)
    return _call(group, async_op, [tensor], comm.scatter_tensors, tensor, scatter_list, named)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> TorchWork | None:
    """Reduce lists of tensors over all ranks and give each rank its part. As torch's on Gloo: all are equal in size."""
    if type(op) is not _NAMED and communicator_of(group):
        op, input_list = _of_copies(op, input_list)
    return _call(group, async_op, [output], comm.reduce_scatter_tensors, output, input_list, op)


@renaming(tensor="input")
def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> TorchWork | None:
    """Reduce ``input`` over all ranks and give each rank its share of it. As torch's."""
    if type(op) is not _NAMED and communicator_of(group):
        op, (input,) = _of_copies(op, [input])  # noqa: A001 - torch's name
    return _call(group, async_op, [output], Communicator.reduce_scatter, output, input, op)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> TorchWork | None:
    """Send one tensor to each rank and receive one from each; sizes may differ. As torch's."""
    return _call(group, async_op, output_tensor_list, comm.alltoall_tensors, output_tensor_list, input_tensor_list)


@renaming(tensor="input", output_counts="output_split_sizes", input_counts="input_split_sizes")
def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group | None = None,
    async_op: bool = False,
) -> TorchWork | None:
    """Send some of the first dimension of ``input`` to each rank, by default the same to each. As torch's."""
    return _call(group, async_op, [output], comm.alltoall_rows, output, input, output_split_sizes, input_split_sizes)


def barrier(
    group: Group | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | float | None = None,
) -> TorchWork | None:
    """Return when all ranks are here. Unlike torch's, it takes no ``device_ids``: it needs no device."""
    refuse("device_ids", device_ids, None, "Call torch.cuda.synchronize() before, if the device must be ready.")
    communicator = communicator_of(group)
    return as_in_torch(communicator, communicator.barrier(async_op=async_op, timeout=timeout), [])


def monitored_barrier(
    group: Group | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Return when all ranks are here. Unlike in torch, every rank gets the error, and it names all that are late.

    Args:
        group: the ranks, on any backend.
        timeout: how long to wait for them.
        wait_all_ranks: torch's; the error names all ranks that are late in either case.

    Raises:
        CollectiveTimeoutError: names the ranks that did not come, as ``peers``.
    """
    del wait_all_ranks
    communicator_of(group).barrier(timeout=timeout)


all_gather_single = all_gather_into_tensor
reduce_scatter_single = reduce_scatter_tensor


def all_gather_object(
    object_list: list[Any], obj: Any, group: Group | None = None, *, allow_pickle: bool = False
) -> None:
    """Gather the objects of all ranks in ``object_list``. Unlike torch's, it pickles only if ``allow_pickle``."""
    communicator = communicator_of(group)
    if communicator:
        _check_length("object_list", object_list, communicator.size)
        object_list[: communicator.size] = communicator.allgather_object(obj, allow_pickle=allow_pickle)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group | None = None,
    device: Any = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Replace the objects in the list by those of ``src``. Unlike torch's, it pickles only if ``allow_pickle``."""
    del device  # Bytes travel from where the transport wants them.
    communicator = communicator_of(group)
    if not communicator:
        return
    inside = rank_inside(communicator, src, group_src, "src", 0)
    given = list(object_list) if communicator.rank == inside else None
    received = communicator.broadcast_object(given, inside, allow_pickle=allow_pickle)
    if given is None:
        _check_length("object_list", object_list, len(received))
        object_list[: len(received)] = received


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group | None = None,
    group_dst: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Gather the objects of all ranks into the list of ``dst``. Unlike torch's, it pickles only if ``allow_pickle``."""
    communicator = communicator_of(group)
    if not communicator:
        return
    inside = rank_inside(communicator, dst, group_dst, "dst", 0)
    if communicator.rank == inside:
        _check_length("object_gather_list", object_gather_list, communicator.size)
    gathered = communicator.gather_object(obj, inside, allow_pickle=allow_pickle)
    if object_gather_list is not None and gathered is not None:
        object_gather_list[: len(gathered)] = gathered


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Group | None = None,
    group_src: int | None = None,
    *,
    allow_pickle: bool = False,
) -> None:
    """Put this rank's object of the list of ``src`` in place 0. Unlike torch's, it pickles only if ``allow_pickle``."""
    communicator = communicator_of(group)
    if not communicator:
        return
    inside = rank_inside(communicator, src, group_src, "src", 0)
    _check_length("scatter_object_output_list", scatter_object_output_list, 1)
    given = scatter_object_input_list if communicator.rank == inside else None
    scatter_object_output_list[0] = communicator.scatter_object(given, inside, allow_pickle=allow_pickle)


def _check_length(argument: str, objects: list[Any] | None, needed: int) -> None:
    """Raise ``ConfigurationError`` unless there is a place for each object."""
    if not isinstance(objects, list) or len(objects) < needed:
        raise ConfigurationError(
            "the list has no place for each object",
            argument=argument,
            expected=f"a list of {needed}",
            seen=f"a list of {len(objects)}" if isinstance(objects, list) else type(objects).__name__,
        )
