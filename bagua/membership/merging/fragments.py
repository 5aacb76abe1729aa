"""Parts of a model that are merged by themselves, and what is on its way to their merges, and from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

__all__ = ["Arrived", "Fragment", "Merge", "Sent"]


class Fragment(NamedTuple):
    """A part of the model that is merged by itself.

    Attributes:
        name: equal on all members.
        numel: elements of a difference.
        dtype: their dtype.
        merge: makes one difference of several, with a weight for each.
    """

    name: str
    numel: int
    dtype: torch.dtype
    merge: Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]


class Merge(NamedTuple):
    """One merge that counts.

    Attributes:
        number: from 1, in the order in which all members take merges in.
        fragment: number of the fragment.
        seats: those whose differences were merged.
        weights: weights of these.
    """

    number: int
    fragment: int
    seats: tuple[int, ...]
    weights: tuple[float, ...]


class Arrived(NamedTuple):
    """A merge that has yet to be taken in here.

    Attributes:
        difference: merged difference; None if nothing was learned.
        own: this member has contributed to it.
    """

    difference: torch.Tensor | None
    own: bool


class Sent(NamedTuple):
    """A difference of this member that has not been merged.

    Attributes:
        difference: flat tensor that stays as it is.
        weight: how much it counts.
        since: when it was contributed, in seconds.
    """

    difference: torch.Tensor
    weight: float
    since: float
