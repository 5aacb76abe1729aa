"""Groups that users pass around: ours, torch's, a communicator, that of other ranks, or none for all ranks."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist

from bagua.comm.communicator import Communicator
from bagua.comm.group import NON_MEMBER, NonMember, ProcessGroup, is_non_member
from bagua.comm.startup.default_group import (
    Group,
    default_communicator,
    from_torch_group,
    get_default_group,
    get_rank,
    get_world_size,
    is_initialized,
    not_a_group,
)
from bagua.comm.startup.initialization import init_process_group
from bagua.errors import InvalidRankError, NotInitializedError

__all__ = [
    "GradBucket", "Group", "as_communicator", "as_group", "available", "backend_of", "communicator_of",
    "rank_among_all", "ranks_of", "size_of_all",
]  # fmt: skip

#: What torch's DDP hands to communication hooks.
GradBucket = dist.GradBucket

_guard = threading.Lock()
_made_of: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def available() -> bool:
    """Whether there are ranks to talk to: ``init_process_group`` was called, ours or torch's."""
    return is_initialized() or (dist.is_available() and dist.is_initialized())


def rank_among_all() -> int:
    """Rank of this process, ours or torch's; before initialization what the launcher says, else 0."""
    return get_rank() if is_initialized() or not available() else dist.get_rank()


def size_of_all() -> int:
    """How many ranks there are, of ours or torch's; before initialization what the launcher says, else 1."""
    return get_world_size() if is_initialized() or not available() else dist.get_world_size()


def communicator_of(group: Group | None) -> Communicator | NonMember:
    """What a call on ``group`` is made on, quickly: it is looked up in every call of a function.

    Args:
        group: a group or communicator of ``bagua.comm``, or a group of ``torch.distributed`` whose members all
            call; None means all ranks.

    Raises:
        NotInitializedError: without ``init_process_group``.
        InvalidTypeError: something else than a group.
    """
    if group is None:
        return default_communicator()
    if isinstance(group, Communicator | NonMember):
        return group
    return NON_MEMBER if is_non_member(group) else as_group(group).global_communicator


def as_communicator(group: Any = None) -> Communicator:
    """The communicator of a group of any kind; see ``as_group``."""
    return group if isinstance(group, Communicator) else as_group(group).global_communicator


def as_group(group: Any = None, argument: str = "group") -> ProcessGroup:
    """Our group of the ranks of ``group``. Collective among them, the first time that a group of torch is given.

    Args:
        group: a group of ``bagua.comm`` or of ``torch.distributed``; None means all ranks. If only
            torch is initialized then, the group of all ranks is joined.
        argument: its name, for errors.

    Raises:
        NotInitializedError: nothing is initialized; or only torch is, and ``group`` is not all ranks.
        InvalidRankError: this rank is not a member of ``group``.
        InvalidTypeError: something else than a group.
    """
    if isinstance(group, ProcessGroup):
        return group
    if is_non_member(group):
        raise InvalidRankError(
            "this rank is not a member of the group",
            argument=argument,
            expected="a group whose member this rank is, or None for all ranks",
            seen=repr(NON_MEMBER),
            advice="Let only its members call this.",
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise not_a_group(group, argument)
    everyone = group is None or (dist.is_initialized() and group is dist.group.WORLD)
    if not is_initialized():
        _join(everyone)
    return get_default_group() if group is None or everyone else _adopted(group)


def _join(everyone: bool) -> None:
    """Let bagua join torch's ranks, if all of them are calling."""
    if not available():
        raise NotInitializedError(
            "there is no group of ranks", advice="Call bagua.comm.init_process_group() once, before everything else."
        )
    if not everyone:
        raise NotInitializedError(
            "torch.distributed is initialized, bagua is not, and only some ranks are here to do it",
            advice="Call bagua.comm.init_process_group() on all ranks, after torch's.",
        )
    init_process_group()


def _adopted(group: dist.ProcessGroup) -> ProcessGroup:
    """Our group of the ranks of ``group``, the same one in every call."""
    with _guard:
        found = _made_of.get(group)
    if found is None or found.closed:
        found = from_torch_group(group)
        with _guard:
            _made_of[group] = found
    return found


def ranks_of(group: Group | None) -> tuple[int, ...]:
    """Global ranks of the members of ``group``, in the order of their ranks in it; none for a non-member.

    Raises:
        NotInitializedError: ``group`` is None, without ``init_process_group``.
        InvalidTypeError: something else than a group.
    """
    group = get_default_group() if group is None else group
    if isinstance(group, ProcessGroup | Communicator | NonMember):
        return group.ranks
    if is_non_member(group):
        return ()
    if not isinstance(group, dist.ProcessGroup):
        raise not_a_group(group)
    return tuple(dist.get_process_group_ranks(group))


def backend_of(group: Group | None) -> str:
    """Name of the transport of ``group``, or of torch's backend.

    Raises:
        NotInitializedError: ``group`` is None, without ``init_process_group``.
        InvalidRankError: this rank is not a member of ``group``.
        InvalidTypeError: something else than a group.
    """
    if isinstance(group, Communicator):
        return group.backend
    if isinstance(group, dist.ProcessGroup):
        return str(dist.get_backend(group))
    return (get_default_group() if group is None else as_group(group)).backend
