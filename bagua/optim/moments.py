"""What all forms of Adam do with their moments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def begin_at_zero(state: dict[str, Any], parameter: torch.Tensor, *names: str) -> None:
    """Make tensors of zeros like ``parameter`` in its state."""
    for name in names:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def denominators(squares: Sequence[torch.Tensor], beta2: float, updates: int, eps: float) -> list[torch.Tensor]:
    """What first moments are divided by: ``sqrt(v / (1 - beta2 ** updates)) + eps``.

    Args:
        squares: second moments ``v``.
        beta2: part of them that is kept in an update.
        updates: how often they were updated.
        eps: number that is added.

    Returns:
        New tensors.
    """
    scale = torch._foreach_sqrt(list(squares))  # noqa: SLF001
    torch._foreach_div_(scale, math.sqrt(1 - beta2**updates))
    torch._foreach_add_(scale, eps)
    return list(scale)
