"""Telling ranks that only round differently from ranks that hold different weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from bagua.comm import Communicator

#: Units in the last place of the largest element by which ranks may come apart in one step.
_UNITS = 16
#: A share of the largest element that is no rounding any more, in any dtype after any number of steps.
_MOST = 0.03


def differ_by_rounding(tensors: Sequence[torch.Tensor], steps: int, communicator: Communicator) -> bool:
    """Whether what ranks hold is the same but for rounding. Collective.

    Ranks that step from the same gradients round each step for themselves: processors, libraries and numbers of threads
    differ in the last bits. Such differences add up like a random walk, so they may grow with the root of ``steps``.

    Args:
        tensors: tensors of this rank, equal in shapes and dtypes on all ranks.
        steps: since ranks held the same bits.
        communicator: communicator of the ranks.
    """
    worst = 0.0
    for own in tensors:
        of_first = own.detach().clone()
        communicator.broadcast(of_first)
        worst = max(worst, _distance(own.detach(), of_first) / _admitted(own.dtype, steps))
    return bool(max(communicator.allgather_object(worst)) <= 1)


def _admitted(dtype: torch.dtype, steps: int) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return _MOST
    return min(_UNITS * torch.finfo(dtype).eps * math.sqrt(max(steps, 1)), _MOST)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two elements, over the largest element; infinite where only one is not a number."""
    if not (one.is_floating_point() or one.is_complex()):
        return 0.0 if torch.equal(one, other) else math.inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = float((one - other).abs().masked_fill(same, 0.0).nan_to_num(math.inf).max()) if one.numel() else 0.0
    largest = float(other.abs().nan_to_num(0.0, 0.0).max()) if other.numel() else 0.0
    return apart if apart in (0.0, math.inf) else apart / largest if largest else math.inf
