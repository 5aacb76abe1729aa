"""Dion: steps along orthonormal directions of low rank, for matrices; AdamW for everything else."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from bagua.checks import check_numbers, check_whole
from bagua.optim.group_optimizer import GroupOptimizer, begin_at_zero, check_betas, check_not_negative, denominators
from bagua.primitives import orthonormal

_EPSILON = 1e-8


class DionOptimizer(GroupOptimizer):
    r"""Steps of matrices along orthonormal directions of low rank of their momenta; AdamW for everything else.

    For a matrix with at least as many rows as columns (transposed otherwise), with :math:`Q` (columns x
    ``matrix_rank``) from the step before,

    .. math::

        M &\leftarrow M + G, \qquad P = \operatorname{orth}(M Q), \qquad R = M^T P, \\
        M &\leftarrow M - (1 - \mu) P R^T, \qquad Q \leftarrow R \text{ with columns of length 1}, \\
        W &\leftarrow (1 - \gamma \lambda) W - \gamma \sqrt{\text{rows} / \text{columns}} \, P Q^T .

    A tensor with more dimensions is a matrix of its first one by all others. Matrices with no more elements than
    :math:`P` and :math:`Q` together are left to AdamW. With ``DionAlgorithm`` the directions are those of all ranks:
    the exchange makes them, and what is remembered of them is remembered there.

    Args:
        params: parameters, or groups of them.
        lr: learning rate :math:`\gamma`.
        matrix_rank: columns of :math:`P` and :math:`Q`.
        momentum: :math:`\mu`, from 0 and less than 1.
        weight_decay: :math:`\lambda`, of all parameters.
        adam_lr: learning rate of AdamW over that of matrices.
        betas: coefficients of AdamW's running averages.
        eps: term that keeps AdamW from dividing by zero.
        seed: seed of the first :math:`Q`.

    Raises:
        ConfigurationError: a number out of its range.

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(4))
        >>> optimizer = DionOptimizer([weight], lr=0.1, matrix_rank=1)
        >>> weight.square().sum().backward()
        >>> before = weight.detach().clone()
        >>> optimizer.step()
        >>> torch.linalg.vector_norm(weight.detach() - before).round(decimals=3)
        tensor(0.1000)

    Paper: Ahn, Xu, "Dion: Distributed Orthonormalized Updates", 2025.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.01,
        matrix_rank: int = 16,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adam_lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        seed: int = 0,
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay, adam_lr=adam_lr, eps=eps)
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", momentum=momentum)
        check_whole(1, matrix_rank=matrix_rank)
        check_betas(betas)
        self.matrix_rank, self.momentum, self.seed = matrix_rank, momentum, seed
        defaults = {"lr": lr, "weight_decay": weight_decay, "adam_lr": adam_lr, "betas": betas, "eps": eps}
        super().__init__(params, defaults)

    def note_direction(self, parameter: torch.Tensor) -> None:
        """Say that what lies in ``parameter.grad`` in the next step is a direction already."""
        self.state[parameter]["directed"] = True

    def _step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(group, parameter, parameter.grad)

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        lr = float(group["lr"])
        if self.state[parameter].pop("directed", False):
            direction = gradient
        elif self._is_matrix(parameter):
            direction = self._direction(parameter, gradient)
        else:
            lr *= group["adam_lr"]
            direction = self._adam(group, parameter, gradient)
        parameter.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)

    def _is_matrix(self, parameter: torch.Tensor) -> bool:
        if parameter.dim() < 2:
            return False
        rows, columns = parameter.flatten(1).shape
        return (rows + columns) * self.matrix_rank < rows * columns

    def _direction(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        matrix = gradient.flatten(1)
        rows, columns = matrix.shape
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if "momentum" not in state:
            generator = torch.Generator().manual_seed(self.seed)
            first = torch.randn(min(rows, columns), self.matrix_rank, generator=generator, dtype=wide, device="cpu")
            state["momentum"] = torch.zeros(rows, columns, dtype=wide, device=parameter.device)
            state["right_factor"] = first.to(parameter.device)
        for name in ("momentum", "right_factor"):  # To load a state makes it as narrow as the weights.
            state[name] = state[name].to(wide)
        momentum: torch.Tensor = state["momentum"].add_(matrix)
        tall = momentum if rows >= columns else momentum.t()
        left = orthonormal(tall @ state["right_factor"])
        right: torch.Tensor = tall.t() @ left
        tall.addmm_(left, right.t(), alpha=-(1 - self.momentum))
        unit = right / (torch.linalg.vector_norm(right, dim=0, keepdim=True) + _EPSILON)
        state["right_factor"] = unit
        product: torch.Tensor = left @ unit.t() * math.sqrt(rows / columns)
        return (product if rows >= columns else product.t()).reshape(parameter.shape).to(parameter.dtype)

    def _adam(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if "exp_avg" not in state:
            state["step"] = 0
            begin_at_zero(state, parameter, "exp_avg", "exp_avg_sq")
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        [scale] = denominators([state["exp_avg_sq"]], beta2, state["step"], group["eps"])
        average: torch.Tensor = state["exp_avg"]
        return average.div(scale).div_(1 - beta1 ** state["step"])
