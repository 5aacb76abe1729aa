"""Steps of one size along the largest cosine coefficients of momenta, which stay on their ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import torch

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Exchange
from bagua.algorithms.exchanges.fields import Every, Then
from bagua.algorithms.exchanges.flight import Flight
from bagua.algorithms.exchanges.model import Model
from bagua.algorithms.exchanges.values import Gradients, Mean
from bagua.checks import check_flags
from bagua.compression import DCTTopK
from bagua.errors import ConfigurationError
from bagua.primitives import CosineReducer, ErrorFeedback, SparseReducer, SumReducer


@dataclass(frozen=True)
class DeMoAlgorithm(ByHost):
    """Step by the sign of the largest cosine coefficients of momenta; what is not sent stays in the momentum: DeMo.

    ``d_i <- decay d_i + lr g_i``; ``q_i``: the ``kept`` largest coefficients of each block of ``d_i``; ``d_i <- d_i -
    IDCT(q_i)``; each coefficient of ``Q`` is the mean of those ``q_i`` that have it; the gradient becomes
    ``sign(IDCT(Q))``, and ``torch.optim.SGD`` without momentum steps by it. Its ``weight_decay`` is a decoupled one
    then. Take half to two thirds of the learning rate that suits Adam: every step has its size. Do not clip.

    Momenta belong to their ranks: save ``bagua_state_dict()`` on each. Blocks are ``side`` x ``side`` elements that
    follow each other in flat memory, as in ``DCTTopK``; in the paper they are tiles of each matrix.

    Args:
        hierarchical: sum inside each host in full precision, and choose coefficients between hosts only.
        decay: part of a momentum that is kept in a step, above 0 and at most 1. 0.999 in the paper, whose trainings
            are long.
        side: side of a block, a multiple of 4.
        kept: coefficients of a block, at least 1. 32 send a quarter, and lose more in trainings of some thousand steps.
        value_bits: 8, 2, or None for coefficients in single precision; see ``BlockTopK``.

    Raises:
        ConfigurationError: an option that cannot be used; when a model is wrapped: a parameter that no
            ``torch.optim.SGD`` without momentum steps.

    Example:
        >>> DeMoAlgorithm(kept=64).decay
        0.97

    Paper: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024.
    """

    hierarchical: bool = True
    _: KW_ONLY
    decay: float = 0.97
    side: int = 64
    kept: int = 128
    value_bits: int | None = 8

    optimizer_class: ClassVar[Callable[..., torch.optim.Optimizer] | None] = torch.optim.SGD

    def __post_init__(self) -> None:
        check_flags(hierarchical=self.hierarchical)
        _ = self.reducer  # Refuses options that it cannot use.

    @property
    def reducer(self) -> SumReducer:
        """Mean coefficients of those who sent them, with error feedback, which is the momentum."""
        coefficients = DCTTopK(self.side, self.kept, self.value_bits).coefficients
        return DecoupledMomentum(CosineReducer(SparseReducer(coefficients, contributors=True), self.side), self.decay)

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        """Gradients times learning rates; their place is taken by signs."""
        how = Mean(self.reducer, self.hierarchical)
        return (Exchange(RatedGradients(), Every(), how, SignsToGradients()),)

    def check(self, model: Model) -> None:
        """Refuse optimizers that do not step by the sign."""
        for name, parameter in model.parameters.items():
            owner = model.owner_of(parameter)
            if owner is None or not isinstance(owner[0], torch.optim.SGD) or owner[1]["momentum"]:
                raise ConfigurationError(
                    f"no SGD without momentum steps {name}",
                    argument="optimizers",
                    expected="torch.optim.SGD with momentum=0 for all trainable parameters",
                    seen=[type(optimizer).__name__ for optimizer in model.optimizers],
                    advice="The momentum lives in the exchange. Take half to two thirds of the rate that suits Adam.",
                )


@dataclass(frozen=True)
class DecoupledMomentum(ErrorFeedback):
    """``ErrorFeedback`` in place of a momentum: one rank alone needs it as well."""

    alone: ClassVar[bool] = True


@dataclass(frozen=True)
class RatedGradients(Gradients):
    """The gradients of this step times the learning rates of their parameters."""

    max_lag: ClassVar[int | None] = 0

    def fill(self, flight: Flight) -> None:
        """Multiply where they lie."""
        torch._foreach_mul_(flight.bucket.gradient_views, flight.learning_rates())


@dataclass(frozen=True)
class SignsToGradients(Then):
    """The gradient becomes the sign of the result; NaN stays."""

    alone: ClassVar[bool] = True
    replaces: ClassVar[bool] = True

    def fold(self, flight: Flight) -> None:
        """Write signs where the gradients lie, in the scale of the loss."""
        flat = flight.flat
        flat.copy_(torch.where(flat.isfinite(), flat.sign(), torch.nan)).mul_(flight.loss_scale)


DeMoAlgorithmImpl = bound_form(DeMoAlgorithm)
