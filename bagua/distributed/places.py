"""Who is meant: groups in each form, and ranks that are global unless they are named otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from bagua.comm import CallbackThread, Communicator, NonMember, TorchWork, Work
from bagua.errors import ConfigurationError, InvalidRankError


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
    return TorchWork(work, outputs, _callbacks_of(communicator))


_callback_threads: weakref.WeakKeyDictionary[Communicator, CallbackThread] = weakref.WeakKeyDictionary()


def _callbacks_of(communicator: Communicator) -> CallbackThread:
    """Where callbacks of futures of this communicator run; the thread starts with the first of them."""
    found = _callback_threads.get(communicator)
    if found is None:
        found = _callback_threads.setdefault(communicator, CallbackThread(f"bagua-{communicator.label}-callbacks"))
        weakref.finalize(communicator, found.stop, 0.0)
    return found
