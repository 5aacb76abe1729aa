"""Groups and ranks, with the names, arguments and meaning of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

import bagua.observe  # noqa: F401 - ranks are watched from here on
from bagua import comm
from bagua.checks import check_kind, refuse
from bagua.comm import NON_MEMBER, Group, NonMember, ProcessGroup, Store, meet_at
from bagua.errors import ConfigurationError, InvalidRankError

__all__ = [
    "GroupMember", "destroy_process_group", "get_backend", "get_global_rank", "get_group_rank",
    "get_process_group_ranks", "get_rank", "get_world_size", "group", "init_process_group", "new_group",
    "new_subgroups", "new_subgroups_by_enumeration", "split_group",
]  # fmt: skip

_NO_OPTIONS = "These are options of torch's backends; bagua.comm has its own arguments."


class _WithWorld(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:  # noqa: N802 - torch's name
        """The group of all ranks; None before ``init_process_group``."""
        return comm.get_default_group() if comm.is_initialized() else None


class group(metaclass=_WithWorld):  # noqa: N801 - torch's name
    """``group.WORLD`` is the group of all ranks. Unlike torch's, it cannot be assigned."""


class GroupMember(metaclass=_WithWorld):
    """``GroupMember.NON_GROUP_MEMBER`` is what a rank holds of a group of others. Unlike torch's, it is false."""

    NON_GROUP_MEMBER = NON_MEMBER


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Connect all ranks. Unlike torch's, no backend means the fastest, and a second call is a ``RuntimeError``.

    Args:
        backend: see ``bagua.comm.init_process_group``.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``; ``?rank=0&world_size=2`` may follow.
        timeout: default deadline of each call.
        world_size: number of processes.
        rank: rank of this process.
        store: store through which ranks meet, instead of ``init_method``.
        group_name: has no meaning, as in torch.
        pg_options: refused.
        device_id: a device, or its number. Transports take devices from tensors, so it is checked only.
    """
    del group_name
    refuse("pg_options", pg_options, None, _NO_OPTIONS)
    check_kind((torch.device, int, type(None)), "a torch.device, a number, or None", device_id=device_id)
    if init_method is not None and store is not None:
        raise ConfigurationError(
            "ranks meet in one place", argument="init_method", expected="one of init_method and store", seen="both"
        )
    if init_method not in {None, "env://"} and not comm.is_initialized():
        assert init_method is not None
        patience = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout) if timeout else None
        store, rank, world_size = meet_at(init_method, rank, world_size, patience or comm.default_pg_timeout)
    name = None if backend is None else str(backend).lower()
    comm.init_process_group(backend=name, timeout=timeout, store=store, rank=rank, world_size=world_size)


def get_rank(group: Group | None = None) -> int:
    """Rank of this process in ``group``, -1 if it is no member; before initialization a ``NotInitializedError``."""
    return comm.get_rank(comm.get_default_group() if group is None else group)


def get_world_size(group: Group | None = None) -> int:
    """Size of ``group``, -1 if this rank is no member; before initialization a ``NotInitializedError``."""
    return comm.get_world_size(comm.get_default_group() if group is None else group)


def destroy_process_group(group: Group | None = None) -> None:
    """End a group, all of them by default. Unlike torch's, it may be called again."""
    if group is None or group is GroupMember.WORLD:
        comm.destroy_process_group()
    elif isinstance(group, ProcessGroup | NonMember):
        group.close()
    else:
        raise ConfigurationError(
            "only groups of bagua are ended here",
            argument="group",
            expected="what new_group returned, or None for all",
            seen=type(group).__name__,
            advice="torch.distributed.destroy_process_group ends those of torch.",
        )


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    sort_ranks: bool = True,
) -> ProcessGroup | NonMember:
    """A group of some ranks; called by all. Unlike torch's, ranks are always sorted, and all ranks must call.

    Args:
        ranks: global ranks of its members; None means all.
        timeout: default deadline of its calls; None means that of the group of all ranks.
        backend: None means that of the group of all ranks.
        pg_options: refused.
        use_local_synchronization: refused: all ranks call.
        group_desc: name of the group in messages.
        device_id: see ``init_process_group``.
        sort_ranks: False is refused unless ``ranks`` are sorted.
    """
    refuse("pg_options", pg_options, None, _NO_OPTIONS)
    refuse("use_local_synchronization", use_local_synchronization, False, "Let all ranks call new_group.")
    check_kind((torch.device, int, type(None)), "a torch.device, a number, or None", device_id=device_id)
    if not sort_ranks and ranks is not None:
        refuse("ranks", list(ranks), sorted(ranks), "Members are numbered in the order of their global ranks.")
    return comm.new_group(
        ranks, backend=None if backend is None else str(backend).lower(), timeout=timeout, label=group_desc
    )


def new_subgroups(
    group_size: int | None = None,
    group: Group | None = None,
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]:
    """Groups of neighbouring ranks: this rank's, and all. Unlike in torch, the size must be given on CUDA, too."""
    ranks = list(comm.ranks_of(group))
    if type(group_size) is not int or group_size < 1 or len(ranks) % group_size:
        raise ConfigurationError(
            "the group does not split into groups of this size",
            argument="group_size",
            expected=f"a divisor of {len(ranks)}",
            seen=repr(group_size),
        )
    parts = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
    return new_subgroups_by_enumeration(parts, timeout, backend, pg_options, group_desc)


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]],
    timeout: timedelta | float | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> tuple[ProcessGroup | NonMember, list[ProcessGroup | NonMember]]:
    """Groups of these ranks: this rank's, and all. Unlike in torch, a rank in none has the sentinel, not None."""
    _check_apart("ranks_per_subgroup_list", ranks_per_subgroup_list)
    made = [new_group(ranks, timeout, backend, pg_options, group_desc=group_desc) for ranks in ranks_per_subgroup_list]
    return next((one for one in made if one), NON_MEMBER), made


def split_group(
    parent_pg: Group | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | float | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> ProcessGroup | NonMember:
    """This rank's part of ``parent_pg``, divided by lists of its ranks. Unlike torch's, it runs on any backend."""
    refuse("pg_options", pg_options, None, _NO_OPTIONS)
    if parent_pg is not None and not comm.communicator_of(parent_pg):
        return NON_MEMBER
    parent = comm.get_default_group() if parent_pg is None else comm.as_group(parent_pg, "parent_pg")
    parts = split_ranks or ()
    _check_apart("split_ranks", parts)
    made = [
        parent.subgroup(
            ranks,
            backend=None if backend is None else str(backend).lower(),
            timeout_s=None if timeout is None else comm.as_seconds(timeout),
            label=group_desc or "split",
        )
        for ranks in parts
    ]
    return next((one for one in made if one), NON_MEMBER)


def _check_apart(argument: str, parts: Sequence[Sequence[int]]) -> None:
    """Raise ``ConfigurationError`` unless there are lists of ranks, and no rank is in two of them."""
    named = [rank for part in parts for rank in part]
    if not parts or len(set(named)) < len(named):
        raise ConfigurationError(
            "not a division of the ranks",
            argument=argument,
            expected="lists of ranks, each rank in at most one",
            seen=repr(parts),
        )


def get_backend(group: Group | None = None) -> str:
    """Name of the transport. Unlike torch's, ``shm``, ``hybrid`` and ``threads`` are among them."""
    return comm.backend_of(group)


def get_process_group_ranks(group: Group | None) -> list[int]:
    """Global ranks of the members, in the order of their ranks in the group; none for a non-member. As torch's."""
    return list(comm.ranks_of(group))


def get_global_rank(group: Group | None, group_rank: int) -> int:
    """Global rank of a member. As torch's."""
    ranks = comm.ranks_of(group)
    return ranks[comm.check_rank(group_rank, len(ranks), "group_rank")]


def get_group_rank(group: Group | None, global_rank: int) -> int:
    """Rank in the group of a global rank. As torch's."""
    ranks = comm.ranks_of(group)
    if global_rank not in ranks:
        raise InvalidRankError(
            "not a member of the group",
            argument="global_rank",
            expected=f"one of {list(ranks)}",
            seen=repr(global_rank),
        )
    return ranks.index(global_rank)
