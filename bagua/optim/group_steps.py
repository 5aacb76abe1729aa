"""What every ``step`` of an optimizer does: the closure first, then each group of parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from bagua.errors import ConfigurationError


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


class OneByOneOptimizer(GroupOptimizer):
    """An optimizer that updates one parameter after the other."""

    def _step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(group, parameter, parameter.grad)

    @abstractmethod
    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one of the parameters of ``group``."""


class TogetherOptimizer(GroupOptimizer):
    """An optimizer that counts the steps of each parameter, and updates those together that take the same one."""

    def _step_group(self, group: dict[str, Any]) -> None:
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in with_gradient:
            _refuse_unless_dense_and_real(parameter.grad)
        by_step: dict[int, list[torch.Tensor]] = {}  # Usually the step is the same for all.
        for parameter in with_gradient:
            self._prepare(parameter)
            state = self.state[parameter]
            state["step"] += 1
            by_step.setdefault(int(state["step"]), []).append(parameter)
        for step, parameters in by_step.items():
            self._update(group, step, parameters)

    @abstractmethod
    def _prepare(self, parameter: torch.Tensor) -> None:
        """Make what the state of a parameter lacks; ``step`` counts the steps that it has taken."""

    @abstractmethod
    def _update(self, group: dict[str, Any], step: int, parameters: list[torch.Tensor]) -> None:
        """Update some parameters of ``group``, all of which have a gradient.

        Args:
            group: options of the group.
            step: number of the step that they take, from 1.
            parameters: parameters that take it.
        """


def _refuse_unless_dense_and_real(gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided or gradient.is_complex():
        raise ConfigurationError(
            "this optimizer cannot use this gradient",
            argument="params",
            expected="parameters with dense, real gradients",
            seen=f"{gradient.dtype}, {gradient.layout}",
        )
