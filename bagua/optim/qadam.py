"""Adam whose second moment is frozen after a warm-up, so that what ranks exchange can be compressed.

Then LAMB with trust ratios that are frozen, too, so that momenta can be sent in one bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from bagua.checks import check_numbers, check_whole
from bagua.optim.group_optimizer import TogetherOptimizer, begin_at_zero, check_betas, check_not_negative, denominators

#: The exchange tells 256 values of the momentum apart: what is smaller than that is zero to it.
_DEAD = 2.0**-16


class QAdamOptimizer(TogetherOptimizer):
    r"""Adam for ``warmup_steps`` steps; then its second moment no longer changes.

    In the :math:`t`-th step, with the gradient :math:`g`, to which weight decay was added, and with
    :math:`w` = ``warmup_steps``,

    .. math::

        m_t &= \beta_1 m_{t-1} + (1 - \beta_1) g, \\
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) g^2 \text{ if } t \le w, \text{ else } v_w, \\
        x &\leftarrow x - \gamma \, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^{\min(t, w)})} + \epsilon}.

    With a fixed denominator the update is linear in the gradients, and the error of a compressed
    exchange neither enters it nor grows in it. On its own this optimizer communicates nothing; see
    ``QAdamAlgorithm``. Each parameter counts its own steps.

    An element that had next to no gradient during the warm-up (a dead unit, a constant input, a rare row of
    an embedding) has no estimate to divide by: once it got a gradient, it would take steps of
    :math:`\gamma m / \epsilon`. So after step :math:`w`, with the mean over the elements of the tensor,

    .. math::

        v_w &\leftarrow v_w \text{ where } v_w \ge 2^{-16} \operatorname{mean}(v_w),
        \text{ else the mean of } v_w \text{ over those elements.}

    A gradient like those of the rest of its tensor then moves such an element by about :math:`\gamma`, as
    Adam would once it had settled. The bound is that of the compressed exchange, which tells 256 values
    apart: below a 256th of the root mean square, a momentum is zero to it. A tensor without any gradient in
    the warm-up takes the mean square of its first one that is not zero, for all of its elements.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        warmup_steps: steps in which the second moment is estimated, at least 1: there is no
            update without it. The time it needs to settle is that of Adam, about
            :math:`1 / (1 - \beta_2)` steps.
        betas: :math:`\beta_1, \beta_2`.
        eps: added to the denominator.
        weight_decay: factor on the weights that are added to the gradient.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = QAdamOptimizer([weight], lr=0.1, warmup_steps=10)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])

    Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed", ICML 2021.
    """

    #: Whether weights decay by themselves instead of through the gradient.
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        check_whole(1, warmup_steps=warmup_steps)
        self.warmup_steps = warmup_steps
        #: By parameter: the second moment, what else its denominator was made of, and the denominator.
        self._frozen: dict[torch.Tensor, tuple[torch.Tensor, tuple[float | None, ...], torch.Tensor]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        """The first moment :math:`m` of ``parameter``, which ``step`` changes in place; zeros before the first one."""
        self._prepare(parameter)
        moment: torch.Tensor = self.state[parameter]["exp_avg"]
        return moment

    def scaling(self, parameter: torch.Tensor) -> float:  # noqa: ARG002 - for optimizers that scale
        """What the momentum of ``parameter`` is multiplied by while ranks exchange it."""
        return 1.0

    def _prepare(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            begin_at_zero(state, parameter, "exp_avg", "exp_avg_sq")

    def _update(self, group: dict[str, Any], step: int, parameters: list[torch.Tensor]) -> None:
        beta1, _ = group["betas"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["weight_decay"] and not self.decoupled:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))  # noqa: SLF001
        torch._foreach_lerp_(self._all("exp_avg", parameters), gradients, 1 - beta1)
        self._estimate(group, step, parameters, gradients)
        self._move(group, step, parameters)
        if step == self.warmup_steps:
            for parameter in parameters:
                self._freeze(parameter)

    def _all(self, name: str, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self.state[parameter][name] for parameter in parameters]

    def _estimate(
        self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> None:
        """Bring the second moments up to date, as long as they change."""
        _, beta2 = group["betas"]
        if step > self.warmup_steps:
            self._wake(parameters, gradients, beta2)
            return
        second = self._all("exp_avg_sq", parameters)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, list(gradients), list(gradients), value=1 - beta2)

    def _denominators(self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the momenta of step ``step`` are divided by; not to be changed."""
        beta2, eps = group["betas"][1], group["eps"]
        if step <= self.warmup_steps:
            return denominators(self._all("exp_avg_sq", parameters), beta2, step, eps)
        return [self._frozen_denominator(parameter, beta2, eps) for parameter in parameters]

    def _frozen_denominator(self, parameter: torch.Tensor, beta2: float, eps: float) -> torch.Tensor:
        """The denominator of a second moment that does not change. To make it takes longer than the rest of a step."""
        second: torch.Tensor = self.state[parameter]["exp_avg_sq"]
        # Who changes or replaces the second moment, as a checkpoint does, changes its version, or its identity.
        made_of = (self.warmup_steps, beta2, eps, None if second.is_inference() else second._version)  # noqa: SLF001
        known = self._frozen.get(parameter)
        if known is None or known[0] is not second or known[1] != made_of or second.is_inference():
            [made] = denominators([second], beta2, self.warmup_steps, eps)
            known = self._frozen[parameter] = (second, made_of, made)
        return known[2]

    def _move(self, group: dict[str, Any], step: int, parameters: Sequence[torch.Tensor]) -> None:
        """Step the weights."""
        scale, rate = self._denominators(group, step, parameters), float(group["lr"]) / (1 - group["betas"][0] ** step)
        torch._foreach_addcdiv_(list(parameters), self._all("exp_avg", parameters), scale, value=-rate)

    def _freeze(self, parameter: torch.Tensor) -> None:
        """The warm-up is over: give elements without an estimate that of the others."""
        second: torch.Tensor = self.state[parameter]["exp_avg_sq"]
        if not second.any():
            self.state[parameter]["asleep"] = True
            return
        alive = second >= _DEAD * second.mean(dtype=_wide(second))
        scale = second.sum(dtype=_wide(second)) / alive.sum()
        second.copy_(torch.where(alive, second, scale.to(second.dtype)))

    def _wake(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], beta2: float) -> None:
        """Freeze the second moment of parameters whose first gradient comes after the warm-up."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            if "asleep" in state and gradient.any():
                del state["asleep"]
                wide = gradient.to(_wide(gradient))
                mean_square = wide.square().sum() / wide.count_nonzero()
                state["exp_avg_sq"].fill_(mean_square * (1 - beta2**self.warmup_steps))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


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
