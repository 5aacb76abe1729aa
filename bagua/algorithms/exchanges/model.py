"""What an algorithm may know of the model that is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class Model:
    """The trainable parameters, the optimizers that step them, and the buffers.

    Args:
        parameters: trainable parameters, by name.
        optimizers: optimizers of the model.
        buffers: returns the floating-point buffers as they are now, by name.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        buffers: Callable[[], Mapping[str, torch.Tensor]] = dict,
    ) -> None:
        self.buffers = buffers
        self.parameters = dict(parameters)
        self.optimizers = list(optimizers)
        self._rates: dict[int, list[float]] = {}
        self._owners = {
            id(parameter): (optimizer, number)
            for optimizer in self.optimizers
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def note_rates(self) -> None:
        """Keep the learning rates of this step: a schedule may go on before the step's exchange is made."""
        self._rates = {id(one): [float(group["lr"]) for group in one.param_groups] for one in self.optimizers}

    def forget_rates(self) -> None:
        """Learning rates are those that optimizers have now."""
        self._rates.clear()

    def rate_of(self, parameter: torch.Tensor) -> float:
        """The learning rate of ``parameter``, as noted or as it is now; 0.0 if it has no optimizer."""
        if id(parameter) not in self._owners:
            return 0.0
        optimizer, number = self._owners[id(parameter)]
        return self._rates[id(optimizer)][number] if self._rates else float(optimizer.param_groups[number]["lr"])

    def owner_of(self, parameter: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]] | None:
        """The optimizer of ``parameter``, and its parameter group there; None if there is none."""
        if id(parameter) not in self._owners:
            return None
        optimizer, number = self._owners[id(parameter)]
        return optimizer, optimizer.param_groups[number]
