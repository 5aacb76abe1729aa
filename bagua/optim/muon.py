"""Muon: steps along momenta whose singular values are made equal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch

from bagua.checks import check_choice, check_numbers, unusable
from bagua.optim.group_optimizer import OneByOneOptimizer, begin_at_zero, check_not_negative

Scale = Literal["spectral", "rms"]

#: Of five polynomials, one after the other, that bring singular values from near 0 to near 1.
_COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_EPSILON = 1e-7
_RMS = 0.2


def equalized(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` with singular values near 1, by Newton-Schulz iterations in the dtype of ``matrix``.

    Example:
        >>> equalized(torch.diag(torch.tensor([1.0, 0.5]))).diag().round(decimals=1)
        tensor([1., 1.])
    """
    wide = matrix.shape[0] <= matrix.shape[1]
    x: torch.Tensor = matrix if wide else matrix.t()
    x = x / (torch.linalg.vector_norm(x) + _EPSILON)
    for a, b, c in _COEFFICIENTS:
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.t()


class Muon(OneByOneOptimizer):
    r"""SGD with momentum whose steps have equal singular values, for matrices.

    .. math::

        M &\leftarrow \mu M + G, \qquad O = \operatorname{equalized}(G + \mu M), \\
        W &\leftarrow (1 - \gamma \lambda) W - \gamma s O,

    with :math:`M` in place of :math:`G + \mu M` without Nesterov's momentum. A tensor with more dimensions is a matrix
    of its first dimension by all others. Embeddings, output layers, biases and norms belong to another optimizer, as
    ``torch.optim.AdamW``. As the inner optimizer of ``DiLoCoAlgorithm`` this gives MuLoCo.

    Args:
        params: parameters of two dimensions or more, or groups of them.
        lr: learning rate :math:`\gamma`.
        momentum: :math:`\mu`, from 0 and less than 1.
        nesterov: look ahead.
        weight_decay: :math:`\lambda`.
        scale: size of steps. ``spectral``: :math:`s = \sqrt{\text{rows} / \text{columns}}`; ``rms``:
            :math:`s = 0.2 \sqrt{\max(\text{rows}, \text{columns})}`, for learning rates of AdamW.

    Raises:
        ConfigurationError: a number out of its range, or a parameter that is no matrix.

    Example:
        >>> weight = torch.nn.Parameter(torch.eye(2))
        >>> optimizer = Muon([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.detach().round(decimals=1)
        tensor([[0.9000, 0.0000],
                [0.0000, 0.9000]])

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Therien et al., "MuLoCo:
    Muon is a practical inner optimizer for DiLoCo", 2025.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: Scale = "spectral",
    ) -> None:
        check_not_negative(lr=lr, weight_decay=weight_decay)
        check_numbers(lambda part: 0 <= part < 1, "a number from 0 and less than 1", momentum=momentum)
        check_choice(get_args(Scale), scale=scale)
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "scale": scale}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters.

        Raises:
            ConfigurationError: one of them is no matrix.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() < 2 or not parameter.is_floating_point():
                raise unusable("params", "real parameters of two dimensions or more", f"shape {list(parameter.shape)}")

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state, lr = self.state[parameter], float(group["lr"])
        if not state:
            begin_at_zero(state, parameter, "momentum_buffer")
        buffer = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        ahead = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        matrix = ahead.flatten(1)
        rows, columns = matrix.shape
        size = math.sqrt(rows / columns) if group["scale"] == "spectral" else _RMS * math.sqrt(max(rows, columns))
        wide = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
        parameter.mul_(1 - lr * group["weight_decay"])
        parameter.add_(equalized(wide).view(parameter.shape).to(parameter.dtype), alpha=-lr * size)
