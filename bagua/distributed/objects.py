"""Collectives on objects, with the names and arguments of ``torch.distributed``.

Torch pickles. These functions do so only with ``allow_pickle=True``, on all ranks: unpickling runs what
the others send. Without it they take numbers, strings, bytes, tensors, and containers of these.
"""

from __future__ import annotations

from typing import Any

from bagua.comm import Group, communicator_of
from bagua.distributed.places import rank_inside
from bagua.errors import ConfigurationError

__all__ = [
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
]


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
