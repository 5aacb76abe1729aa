"""Functions that make the optimizer and the schedule of one bucket, for ``DecentralizedDataParallel``.

Each takes what the wrapper calls it with, and keyword arguments for ``functools.partial``.
Weight decay is for matrices: embeddings, and the weights of linear, convolutional and
attention layers. Biases and the weights of norms, which have one dimension, keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from bagua.checks import check_whole
from bagua.optim.group_optimizer import TogetherOptimizer, begin_at_zero, check_betas, check_not_negative, denominators

__all__ = [
    "AccumAdam", "AccumAdamW", "lr_scheduler_fn_cosine_with_warmup", "optim_fn_accum_adam", "optim_fn_accum_adamw",
    "optim_fn_adam", "optim_fn_adamw",
]  # fmt: skip


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


#: The parameters of one bucket, with their names.
NamedParameters = Sequence[tuple[str, torch.nn.Parameter]]


def _groups(parameters: NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, also where one is empty, so that the groups of all buckets correspond."""
    check_not_negative(weight_decay=weight_decay)  # Optimizers look at their defaults only.
    matrices = [parameter for _, parameter in parameters if parameter.dim() > 1]
    others = [parameter for _, parameter in parameters if parameter.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def optim_fn_adam(
    parameters: NamedParameters,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1.0 / 32768,
) -> torch.optim.Optimizer:
    """``torch.optim.Adam`` for one bucket, with weight decay on matrices only.

    Args:
        parameters: names and parameters of the bucket.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: weight decay of matrices.

    Example:
        >>> optimizer = optim_fn_adam(list(torch.nn.Linear(2, 2).named_parameters()), weight_decay=0.5)
        >>> [group["weight_decay"] for group in optimizer.param_groups]
        [0.5, 0.0]
    """
    check_not_negative(lr=lr, eps=eps)
    check_betas((beta1, beta2))
    return torch.optim.Adam(_groups(parameters, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_adamw(
    parameters: NamedParameters,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """``torch.optim.AdamW`` for one bucket, with weight decay on matrices only.

    Args:
        parameters: names and parameters of the bucket.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: weight decay of matrices.

    Example:
        >>> optim_fn_adamw(list(torch.nn.Linear(2, 2).named_parameters()), lr=0.5).param_groups[0]["lr"]
        0.5
    """
    check_not_negative(lr=lr, eps=eps)
    check_betas((beta1, beta2))
    return torch.optim.AdamW(_groups(parameters, weight_decay), lr=lr, betas=(beta1, beta2), eps=eps)


def optim_fn_accum_adam(
    parameters: NamedParameters,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1.0 / 32768,
    accum_iter: int = 4,
) -> torch.optim.Optimizer:
    """``AccumAdam`` for one bucket, with weight decay on matrices only.

    Args:
        parameters: names and parameters of the bucket.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: weight decay of matrices.
        accum_iter: steps between commits of the moments.

    Example:
        >>> optim_fn_accum_adam(list(torch.nn.Linear(2, 2).named_parameters())).param_groups[0]["accum_iter"]
        4
    """
    groups = _groups(parameters, weight_decay)
    return AccumAdam(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def optim_fn_accum_adamw(
    parameters: NamedParameters,
    *,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    accum_iter: int = 4,
) -> torch.optim.Optimizer:
    """``AccumAdamW`` for one bucket, with weight decay on matrices only.

    Args:
        parameters: names and parameters of the bucket.
        lr: learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: weight decay of matrices.
        accum_iter: steps between commits of the moments.

    Example:
        >>> optimizer = optim_fn_accum_adamw(list(torch.nn.Linear(2, 2).named_parameters()), accum_iter=8)
        >>> optimizer.param_groups[0]["accum_iter"]
        8
    """
    groups = _groups(parameters, weight_decay)
    return AccumAdamW(groups, lr=lr, betas=(beta1, beta2), eps=eps, accum_iter=accum_iter)


def lr_scheduler_fn_cosine_with_warmup(
    optimizer: torch.optim.Optimizer,
    t_max: int,
    t_warmup: int,
    cosine_eta_min: float = 1e-6,
    warmup_decay: float = 0.01,
) -> torch.optim.lr_scheduler.LRScheduler:
    """A linear rise of the learning rate, then half a cosine down.

    Args:
        optimizer: optimizer of one bucket.
        t_max: steps of the cosine, after those of the rise.
        t_warmup: steps of the rise.
        cosine_eta_min: the learning rate at the end.
        warmup_decay: the first learning rate, as a share of the highest.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
        >>> schedule = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=2, t_warmup=2, warmup_decay=0.5)
        >>> rates = []
        >>> for _ in range(4):
        ...     rates.append(round(schedule.get_last_lr()[0], 3))
        ...     optimizer.step()
        ...     schedule.step()
        >>> rates
        [0.5, 0.75, 1.0, 0.5]
    """
    check_whole(1, t_max=t_max)
    check_whole(0, t_warmup=t_warmup)
    check_not_negative(cosine_eta_min=cosine_eta_min, warmup_decay=warmup_decay)
    schedules = torch.optim.lr_scheduler
    if t_warmup == 0:
        return schedules.CosineAnnealingLR(optimizer, T_max=t_max, eta_min=cosine_eta_min)
    rise = schedules.LinearLR(optimizer, start_factor=warmup_decay, total_iters=t_warmup)
    fall = schedules.CosineAnnealingLR(optimizer, T_max=t_max, eta_min=cosine_eta_min)
    return schedules.SequentialLR(optimizer, [rise, fall], milestones=[t_warmup])
