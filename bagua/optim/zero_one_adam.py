"""Adam whose second moment changes in some steps only, so that little has to be exchanged exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bagua.errors import ConfigurationError
from bagua.optim.qadam import QAdamOptimizer


class ZeroOneAdamOptimizer(QAdamOptimizer):
    r"""Adam whose second moment changes only where the gradient is exact, and not after ``warmup_steps`` steps.

    On its own every gradient is exact, and this is ``QAdamOptimizer``. ``ZeroOneAdamAlgorithm`` says which ones are. In
    the :math:`t`-th step, the :math:`k`-th with an exact gradient,

    .. math::

        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g, \\
        v_k &= \beta_2 v_{k-1} + (1 - \beta_2) g^2 \text{ if } g \text{ is exact}, \\
        x &\leftarrow x - \gamma \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_k / (1 - \beta_2^k)} + \epsilon}.

    What becomes of elements that had no gradient in the warm-up is said in ``QAdamOptimizer``. A tensor without any
    takes the mean of the second moments of all others.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        warmup_steps: steps in which the second moment may change, at least 1.
        betas: :math:`\beta_1, \beta_2`.
        eps: added to the denominator.
        weight_decay: factor on the weights that are added to the gradient.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = ZeroOneAdamOptimizer([weight], lr=0.1, warmup_steps=10)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])

    Paper: Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", ICLR 2023.
    """

    def _prepare(self, parameter: torch.Tensor) -> None:
        super()._prepare(parameter)
        self.state[parameter].setdefault("variance_steps", 0)
        self.state[parameter].setdefault("rates", 0.0)

    def note(self, parameter: torch.Tensor, *, exact: bool) -> None:
        """Say whether the gradient of ``parameter`` in the next step is exact."""
        self._prepare(parameter)
        self.state[parameter]["exact"] = exact

    def freeze(self, parameter: torch.Tensor) -> None:
        """Change the second moment of ``parameter`` no more, whatever the number of the step. Idempotent."""
        self.momentum(parameter)
        if "frozen" not in self.state[parameter]:
            self._freeze(parameter)

    def denominator(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """What the momentum of ``parameter``, of this group, is divided by."""
        self.momentum(parameter)
        return self._denominators(group, self.state[parameter]["step"], [parameter])[0]

    def resume_from(self, parameter: torch.Tensor, total: torch.Tensor) -> None:
        """Take over the momentum that explains what was learned since the last call.

        Args:
            parameter: parameter whose momentum it is.
            total: momenta of all steps since then, each times its learning rate, added up.
        """
        state = self.state[parameter]
        if state["rates"] > 0:
            state["exp_avg"].copy_(total / state["rates"])
        state["rates"] = 0.0

    def _estimate(
        self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        exact = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            # Who says nothing has exact gradients.
            if state.pop("exact", True) and step <= self.warmup_steps and "frozen" not in state:
                state["variance_steps"] += 1
                exact.append((parameter, gradient))
        if exact:
            super()._estimate(group, step, *map(list, zip(*exact, strict=True)))

    def _denominators(self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        scale = list(torch._foreach_sqrt(self._all("exp_avg_sq", parameters)))  # noqa: SLF001
        for one, parameter in zip(scale, parameters, strict=True):
            state = self.state[parameter]
            if not state["variance_steps"]:
                if "frozen" in state:
                    raise _without_estimate()
                one.fill_(torch.inf)  # Nothing is known of its size: it waits for an exact gradient.
        done = [max(self.state[parameter]["variance_steps"], 1) for parameter in parameters]
        torch._foreach_div_(scale, [math.sqrt(1 - group["betas"][1] ** count) for count in done])
        torch._foreach_add_(scale, group["eps"])
        return scale

    def _move(self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor]) -> None:
        super()._move(group, step, parameters)
        for parameter in parameters:
            if "frozen" in self.state[parameter]:
                self.state[parameter]["rates"] += float(group["lr"]) / (1 - group["betas"][0] ** step)

    def _freeze(self, parameter: torch.Tensor) -> None:
        super()._freeze(parameter)
        state = self.state[parameter]
        state["frozen"] = True
        if state.pop("asleep", False):  # Its first gradient may be that of one rank alone.
            known = [other["exp_avg_sq"].float() for other in self.state.values() if other["exp_avg_sq"].any()]
            total = sum(float(one.sum()) for one in known)
            state["exp_avg_sq"].fill_(total / max(sum(one.numel() for one in known), 1))
            state["variance_steps"] = max(other["variance_steps"] for other in self.state.values())


def _without_estimate() -> ConfigurationError:
    return ConfigurationError(
        "no second moment was estimated before it was frozen",
        argument="optimizers",
        expected="a ZeroOneAdamOptimizer that has taken steps with exact gradients, or whose state was loaded",
        seen="one that has not",
        advice="Begin a training with zero_one_adam, or load the state of the optimizer before the first step.",
    )
