"""Plain tensors as transports move them: flat, and as bytes."""

from __future__ import annotations

import torch


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
