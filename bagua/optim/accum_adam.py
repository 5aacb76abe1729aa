"""Adam whose moments are committed every few steps, for many ranks with small batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from bagua.checks import check_whole
from bagua.optim.group_optimizer import TogetherOptimizer, begin_at_zero, check_betas, check_not_negative, denominators


class AccumAdam(TogetherOptimizer):
    r"""Adam that updates in every step, but commits its moment estimates every ``accum_iter`` steps.

    Where ranks train on small batches and only mix their weights, the square of a
    gradient is mostly noise, and an Adam that averages such squares takes steps that are
    too small. Here the moments are those of mean gradients. In the :math:`j`-th step of the
    :math:`t`-th period of :math:`s` steps, with the gradient :math:`g_j`,

    .. math::

        \hat m &= \beta_1 m_{t-1} + (1 - \beta_1) g_j, \qquad
        \hat v = \beta_2 v_{t-1} + (1 - \beta_2) g_j^2, \\
        x &\leftarrow x - \gamma \, \frac{\hat m / (1 - \beta_1^t)}{\sqrt{\hat v / (1 - \beta_2^t)} + \epsilon},

    and after the last step of the period, with the mean gradient
    :math:`\bar g = \frac{1}{s} \sum_j g_j`,

    .. math::

        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \bar g, \qquad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) \bar g^2.

    With ``accum_iter=1`` this is Adam. Weight decay is added to the gradient.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        betas: :math:`\beta_1, \beta_2`, of a period of ``accum_iter`` steps.
        eps: added to the denominator.
        weight_decay: factor on the weights that are added to the gradient.
        accum_iter: steps in a period, :math:`s`; the number of ranks is a good start.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AccumAdam([weight], lr=0.1, accum_iter=4)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.9000, 0.9000])

    Wang et al., "From Promise to Practice: Realizing High-performance Decentralized
    Training", ICLR 2025.
    """

    #: Whether weights decay by themselves instead of through the gradient.
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
    ) -> None:
        check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        check_whole(1, accum_iter=accum_iter)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "accum_iter": accum_iter}
        )

    def _prepare(self, parameter: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0, dtype=torch.int64, device="cpu")
            begin_at_zero(state, parameter, "exp_avg", "exp_avg_sq", "accum_grad")

    def _update(self, group: dict[str, Any], step: int, parameters: list[torch.Tensor]) -> None:
        (beta1, beta2), period, decay = group["betas"], group["accum_iter"], group["weight_decay"]
        lr = float(group["lr"])
        first, second, total = (
            [self.state[parameter][name] for parameter in parameters]
            for name in ("exp_avg", "exp_avg_sq", "accum_grad")
        )
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if decay and self.decoupled:
            torch._foreach_mul_(parameters, 1 - lr * decay)
        elif decay:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=decay))
        torch._foreach_add_(total, gradients, alpha=1 / period)

        number = -(-step // period)
        provisional = torch._foreach_lerp(first, gradients, 1 - beta1)
        squares = torch._foreach_mul(second, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        scale = denominators(squares, beta2, number, group["eps"])
        torch._foreach_addcdiv_(parameters, provisional, scale, value=-lr / (1 - beta1**number))

        if step % period == 0:
            torch._foreach_lerp_(first, total, 1 - beta1)
            torch._foreach_mul_(second, beta2)
            torch._foreach_addcmul_(second, total, total, value=1 - beta2)
            torch._foreach_zero_(total)


class AccumAdamW(AccumAdam):
    r"""``AccumAdam`` with decoupled weight decay: before each update, :math:`x \leftarrow (1 - \gamma \lambda) x`.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        betas: :math:`\beta_1, \beta_2`, of a period of ``accum_iter`` steps.
        eps: added to the denominator.
        weight_decay: :math:`\lambda`.
        accum_iter: steps in a period.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AccumAdamW([weight], lr=0.1, weight_decay=0.5)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach()
        tensor([0.8500, 0.8500])
    """

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        accum_iter: int = 4,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, accum_iter)
