"""Functions that make the optimizer and the schedule of one bucket, for ``DecentralizedDataParallel``.

Each takes what the wrapper calls it with, and keyword arguments for ``functools.partial``.
Weight decay is for matrices: embeddings, and the weights of linear, convolutional and
attention layers. Biases and the weights of norms, which have one dimension, keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.checks import check_whole
from bagua.optim.accum_adam import AccumAdam, AccumAdamW
from bagua.optim.group_optimizer import check_betas, check_not_negative

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
