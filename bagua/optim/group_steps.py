"""What every ``step`` of an optimizer does: the closure first, then each group of parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class GroupOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer of parameter groups; subclasses say how one of them is stepped."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss anew, and its gradients.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    @abstractmethod
    def _step_group(self, group: dict[str, Any]) -> None:
        """Update those of ``group`` that have a gradient."""
