"""What optimizers have in common: steps by groups of parameters, moments, and checks of what they are given."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.checks import check_numbers, unusable, wrong_type
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


class TogetherOptimizer(GroupOptimizer):
    """An optimizer that counts the steps of each parameter, and updates those together that take the same one."""

    def _step_group(self, group: dict[str, Any]) -> None:
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in with_gradient:
            if parameter.grad.layout is not torch.strided or parameter.grad.is_complex():
                raise ConfigurationError(
                    "this optimizer cannot use this gradient",
                    argument="params",
                    expected="parameters with dense, real gradients",
                    seen=f"{parameter.grad.dtype}, {parameter.grad.layout}",
                )
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


def check_not_negative(**numbers: float | torch.Tensor) -> None:
    """Raise ``ConfigurationError`` for the first of ``numbers`` that is below zero, or no number."""
    for name, number in numbers.items():
        value: object = number.item() if isinstance(number, torch.Tensor) and number.numel() == 1 else number
        check_numbers(lambda number: number >= 0, "a number >= 0", **{name: value})


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ``ConfigurationError`` unless these can be factors of running means."""
    expected = "two numbers in [0, 1)"
    pair: object = betas
    if not isinstance(pair, tuple | list) or not all(type(beta) in (int, float) for beta in pair):
        raise wrong_type("betas", expected, betas)
    if len(pair) != 2 or not all(0 <= beta < 1 for beta in pair):
        raise unusable("betas", expected, betas)


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
