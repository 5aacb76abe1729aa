"""The state of one process in a file: what a run begins with whose store is lost."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua.checks import check_kind
from bagua.errors import BaguaError, ConfigurationError
from bagua.membership.island import first_difference


def check_place(ranks: int, **places: str | os.PathLike[str] | None) -> None:
    """Refuse what is no path, and one file for several ranks of an island."""
    check_kind((str, os.PathLike, type(None)), "a path, or None", **places)
    for argument, place in places.items():
        if place is not None and ranks > 1 and "{rank}" not in os.fspath(place):
            raise ConfigurationError(
                "one file for all ranks of this island",
                argument=argument,
                expected="a path that contains {rank}: each rank has a file of its own",
                seen=os.fspath(place),
            )


def place_of(place: str | os.PathLike[str] | None, seat: int, rank: int) -> Path | None:
    """The file of one rank: ``{seat}`` and ``{rank}`` are replaced."""
    if place is None:
        return None
    return Path(os.fspath(place).replace("{seat}", str(seat)).replace("{rank}", str(rank)))


def write_state(file: Path, facts: Sequence[str], state: Mapping[str, object]) -> None:
    """Write a state that ``torch.load`` can read, in the place of what ``file`` was; all of it, or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with draft.open("wb") as open_file:
            torch.save({"facts": list(facts), "state": dict(state)}, open_file)
            open_file.flush()
            os.fsync(open_file.fileno())
        torch.load(draft, map_location="cpu", weights_only=True, mmap=True)  # What cannot be read is no checkpoint.
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def read_state(file: Path, facts: Sequence[str]) -> dict[str, Any]:
    """The state that ``write_state`` has written for the same model and training. The algorithm may be another."""
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        theirs, state = list(saved["facts"]), dict(saved["state"])
    except Exception as error:  # torch has many ways to say that it is no such file
        raise unusable(file, error) from error
    here, there = _of_model(facts), _of_model(theirs)
    if here != there:
        one, other = first_difference(here, there)
        raise unusable(file, ValueError(f"it was saved by another model or training: {other}, and here is {one}"))
    return state


def _of_model(facts: Sequence[str]) -> list[str]:
    return [fact for fact in facts if not fact.startswith("algorithm ")]


def unusable(file: Path, error: Exception) -> BaguaError:
    """The error of a file from which islands cannot begin, because of ``error``."""
    if isinstance(error, BaguaError):
        return error
    return ConfigurationError(
        f"islands cannot begin from this file: {str(error) or type(error).__name__}",
        argument="resume",
        expected="a file that join_islands(checkpoint=...) has written for the same model",
        seen=str(file),
    )
