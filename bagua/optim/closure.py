"""What every ``step`` of an optimizer begins with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["loss_of"]


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that ``closure`` computes anew, with its gradients; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
