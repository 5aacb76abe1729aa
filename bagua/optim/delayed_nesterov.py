"""Delayed Nesterov: momentum for an anchor that is stepped with the difference of one member after the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bagua.checks import check_numbers, check_whole
from bagua.optim.group_steps import OneByOneOptimizer
from bagua.optim.moments import begin_at_zero
from bagua.optim.options import check_not_negative


class DelayedNesterov(OneByOneOptimizer):
    r"""Gradient descent with momentum that is refreshed, and followed, in every :math:`N`-th step only.

    .. math::

        B \leftarrow B + G, \qquad W \leftarrow W - \frac{\gamma}{N} G;
        \qquad \text{in each } N\text{-th step} \quad
        M \leftarrow \mu M + \frac{B}{N}, \quad W \leftarrow W - \gamma \mu M, \quad B \leftarrow 0.

    As the outer optimizer of ``DiLoCoAlgorithm`` with ``quorum=1`` and ``grace=0.0`` this gives asynchronous DiLoCo: a
    momentum that followed each difference of one member would run away from what the others learn meanwhile.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        momentum: :math:`\mu`, from 0 and less than 1.
        delay: :math:`N`, as a rule the number of members.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = DelayedNesterov([weight], lr=1.0, momentum=0.5, delay=2)
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(1)
        ...     optimizer.step()
        >>> weight.item()
        -1.5

    Paper: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024.
    """

    def __init__(
        self, params: Iterable[Any], lr: float | torch.Tensor = 0.7, momentum: float = 0.9, delay: int = 4
    ) -> None:
        check_not_negative(lr=lr)
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", momentum=momentum)
        check_whole(1, delay=delay)
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay})

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state, lr, delay = self.state[parameter], float(group["lr"]), group["delay"]
        if not state:
            begin_at_zero(state, parameter, "momentum_buffer", "gathered")
            state["step"] = torch.zeros(())
        state["step"] += 1
        gathered = state["gathered"].add_(gradient)
        parameter.add_(gradient, alpha=-lr / delay)
        if int(state["step"]) % delay == 0:
            momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(gathered, alpha=1 / delay)
            parameter.add_(momentum, alpha=-lr * group["momentum"])
            gathered.zero_()
