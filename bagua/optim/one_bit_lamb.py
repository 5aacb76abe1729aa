"""LAMB whose second moment and trust ratios are frozen after a warm-up, so that momenta can be sent in one bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from bagua.checks import check_numbers
from bagua.optim.group_optimizer import denominators
from bagua.optim.qadam import QAdamOptimizer

#: Bounds of a trust ratio in the warm-up.
_RATIOS = (0.01, 10.0)
#: Of what a frozen ratio is multiplied by, and of the change of that factor in one step.
_FACTORS = (0.5, 4.0)
_CHANGES = (0.9, 1.1)


class OneBitLambOptimizer(QAdamOptimizer):
    r"""LAMB for ``warmup_steps`` steps; then its second moment is frozen, and its trust ratios follow from afar.

    With the step :math:`d = \hat m / (\sqrt{\hat v} + \epsilon) + \lambda x` of ``QAdamOptimizer``, for each tensor
    :math:`x \leftarrow x - \gamma \, r \, d`. In the warm-up :math:`r = \lVert x \rVert / \lVert d \rVert`, from 0.01
    to 10, or 1 where one of them is zero. After it

    .. math::

        w &\leftarrow \beta_2 w + (1 - \beta_2) g^2, \\
        f &= \max \frac{\sqrt{\hat v} + \epsilon}{\sqrt{\hat w} + \epsilon}
            \text{, from 0.5 to 4, and within 10 \% of the one before}, \\
        r &= f \bar r,

    where :math:`\bar r` is a running mean of the ratios of the warm-up, which begins with the first of them, and
    :math:`w` begins as the frozen :math:`v`. On its own this optimizer communicates nothing: see
    ``OneBitLambAlgorithm``.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        warmup_steps: steps in which the second moment is estimated, at least 1.
        betas: :math:`\beta_1, \beta_2`.
        eps: added to the denominator.
        weight_decay: :math:`\lambda`.
        ratio_beta: part of :math:`\bar r` that is kept in a step, from 0 and less than 1.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((2,), 3.0))
        >>> optimizer = OneBitLambOptimizer([weight], lr=0.1, warmup_steps=10)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([2.7000, 2.7000])

    Papers: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020; Li et al.,
    "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence Speed", 2021.
    """

    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        ratio_beta: float = 0.9,
    ) -> None:
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", ratio_beta=ratio_beta)
        self.ratio_beta = ratio_beta
        super().__init__(params, lr, warmup_steps, betas, eps, weight_decay)

    def scaling(self, parameter: torch.Tensor) -> float:
        """What brings the momentum of ``parameter`` to the size of those of the other parameters.

        The mean of the root mean squares of all momenta over that of this one, as they were when it was asked for the
        first time; 1.0 where there is no momentum.
        """
        if "scaling" not in self.state[parameter]:
            parameters = [one for group in self.param_groups for one in group["params"]]
            means = _read([self.momentum(one).double().square().mean().sqrt() for one in parameters])
            sizes = dict(zip(parameters, means, strict=True))
            alive = [size for size in sizes.values() if size > 0]
            for one, size in sizes.items():
                self.state[one]["scaling"] = sum(alive) / len(alive) / size if size > 0 else 1.0
        return float(self.state[parameter]["scaling"])

    def _move(self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor]) -> None:
        directions = list(
            torch._foreach_div(self._all("exp_avg", parameters), self._denominators(group, step, parameters))  # noqa: SLF001
        )
        torch._foreach_div_(directions, 1 - group["betas"][0] ** step)
        if group["weight_decay"]:
            torch._foreach_add_(directions, list(parameters), alpha=group["weight_decay"])
        warm, lr = step <= self.warmup_steps, float(group["lr"])
        ratios = self._first_ratios(parameters, directions) if warm else self._later_ratios(group, step, parameters)
        for parameter, direction, ratio in zip(parameters, directions, ratios, strict=True):
            parameter.add_(direction, alpha=-lr * ratio)

    def _first_ratios(self, parameters: Sequence[torch.Tensor], directions: Sequence[torch.Tensor]) -> list[float]:
        """In the warm-up."""
        norms = _read([torch.linalg.vector_norm(one) for one in (*parameters, *directions)])
        ratios = [
            min(max(length / step, _RATIOS[0]), _RATIOS[1]) if length > 0 and step > 0 else 1.0
            for length, step in zip(norms[: len(parameters)], norms[len(parameters) :], strict=True)
        ]
        keep = self.ratio_beta
        for parameter, ratio in zip(parameters, ratios, strict=True):
            state = self.state[parameter]
            state["ratio"] = keep * state["ratio"] + (1 - keep) * ratio if "ratio" in state else ratio
        return ratios

    def _later_ratios(self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor]) -> list[float]:
        """After the warm-up: by how much gradients have become smaller, at most, since then."""
        # Those asleep have no estimate yet to compare with.
        awake = [one for one in parameters if "asleep" not in self.state[one]]
        factors = dict(zip(awake, _read([self._factor(group, step, one) for one in awake]), strict=True))
        return [self._later_ratio(one, factors[one]) if one in factors else 1.0 for one in parameters]

    def _factor(self, group: dict[str, Any], step: int, parameter: torch.Tensor) -> torch.Tensor:
        state, (_, beta2), eps = self.state[parameter], group["betas"], group["eps"]
        fresh = state.setdefault("fresh_sq", state["exp_avg_sq"].clone())
        fresh.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        [frozen], [current] = self._denominators(group, step, [parameter]), denominators([fresh], beta2, step, eps)
        return torch.div(frozen, current, out=current).max()

    def _later_ratio(self, parameter: torch.Tensor, factor: float) -> float:
        state = self.state[parameter]
        before = state.get("factor", 1.0)
        low, high = max(_FACTORS[0], before * _CHANGES[0]), min(_FACTORS[1], before * _CHANGES[1])
        state["factor"] = min(max(factor, low), high)
        return float(state["factor"] * state.get("ratio", 1.0))


def _read(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The numbers in tensors without dimensions: a GPU is waited for once, and not for each of them."""
    if len({one.device for one in scalars}) != 1:
        return [float(one) for one in scalars]
    return [float(one) for one in torch.stack([one.double() for one in scalars]).tolist()]
