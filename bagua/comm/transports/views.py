"""Plain tensors as transports move them: flat, as bytes, and in the mode in which they may be written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Action = TypeVar("Action", bound=Callable[[], Any] | None)


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension with stride 1; a single element may claim any other stride.

    Args:
        tensor: contiguous.
    """
    flat = tensor.view(-1)
    return flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of uint8."""
    return flattened(tensor).view(torch.uint8)


def where_allowed(action: Action, target: torch.Tensor | None) -> Action:
    """``action``, if there is one, in inference mode if the target was made in that, in any thread."""
    if action is None or target is None or not target.is_inference():
        return action
    allowed: Action = torch.inference_mode()(action)
    return allowed
