"""Adam that, after a warm-up, exchanges its momentum in one byte for each element."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar

import torch

from bagua.algorithms.base import ByHost, bound_form
from bagua.algorithms.exchanges.exchange import Every, Exchange
from bagua.algorithms.exchanges.fields import Flight, Model, Then, What
from bagua.algorithms.exchanges.values import Gradients, Mean, Replace
from bagua.checks import check_flags, check_kind
from bagua.compression import MinMaxUInt8
from bagua.errors import ConfigurationError
from bagua.optim import QAdamOptimizer
from bagua.primitives import ScatterGatherReducer, SumReducer


@dataclass(frozen=True)
class FrozenAdam(ByHost):
    """Adam with exact mean gradients in a warm-up, and what a reducer makes of momenta after it; subclasses name it.

    Args:
        q_adam_optimizer: the optimizer of the model; None finds it among those that the model is wrapped
            with. It is not part of the printed form, is not compared, and is left out by pickle.
        hierarchical: sum inside each host in full precision, and use the reducer between hosts only.

    Raises:
        InvalidTypeError: an option of a wrong type.
        ConfigurationError: when a model is wrapped: a parameter that no ``QAdamOptimizer`` owns, or
            several with different warm-ups.
    """

    q_adam_optimizer: QAdamOptimizer | None = field(default=None, repr=False, compare=False)
    hierarchical: bool = True

    #: The class of an optimizer that can step the parameters, or of what derives from it.
    optimizer_class: ClassVar[type[QAdamOptimizer]] = QAdamOptimizer

    def __post_init__(self) -> None:
        check_kind((QAdamOptimizer, NoneType), "a QAdamOptimizer, or None", q_adam_optimizer=self.q_adam_optimizer)
        check_flags(hierarchical=self.hierarchical)
        _ = self.reducer  # Refuses options that it cannot use.

    @property
    @abstractmethod
    def reducer(self) -> SumReducer:
        """What sums momenta."""

    @property
    def phases(self) -> tuple[Hashable, ...]:
        """Warm-up, and what comes after it."""
        return ("warm-up", "compressed")

    def phase(self, step: int, model: Model) -> Hashable:
        """By the number of the step, and the warm-up of the optimizer."""
        return "warm-up" if step < _warmup_steps(model) else "compressed"

    def exchanges(self, phase: Hashable = "compressed") -> tuple[Exchange, ...]:
        """Gradients in the warm-up, momenta after it."""
        if phase == "warm-up":
            return (Exchange(Gradients(), Every(), Mean(hierarchical=self.hierarchical), Replace()),)
        return (Exchange(Momenta(), Every(), Mean(self.reducer, self.hierarchical), MomentaToGradients()),)

    def check(self, model: Model) -> None:
        """Refuse parameters that have no optimizer of the right kind."""
        chosen = self.q_adam_optimizer
        if chosen is not None and not any(chosen is optimizer for optimizer in model.optimizers):
            raise ConfigurationError(
                "this optimizer is not one of those that the model is wrapped with",
                argument="q_adam_optimizer",
                expected="the model's optimizer",
                seen=f"another {type(chosen).__name__}",
                advice="Give both with_bagua and the algorithm the same object, or leave it out in the algorithm.",
            )
        for name, parameter in model.parameters.items():
            owner = model.owner_of(parameter)
            if owner is None or not isinstance(owner[0], self.optimizer_class):
                raise ConfigurationError(
                    f"no {self.optimizer_class.__name__} steps {name}",
                    argument="optimizers",
                    expected=f"a {self.optimizer_class.__name__} of all trainable parameters",
                    seen=[type(optimizer).__name__ for optimizer in model.optimizers],
                    advice=f"Build {self.optimizer_class.__name__}(model.parameters()) and wrap the model with it.",
                )
        _warmup_steps(model)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the optimizer would be of no use: it would own copies of the parameters.
        options = [getattr(self, one.name) for one in dataclasses.fields(self) if one.name != "q_adam_optimizer"]
        return type(self), (None, *options)


@dataclass(frozen=True)
class QAdamAlgorithm(FrozenAdam):
    """Adam with exact mean gradients during a warm-up, and with a compressed mean of momenta after it.

    In a step after the warm-up, rank ``i`` adds its gradient to the momentum, which all have in common:
    ``m_i = beta1 * m + (1 - beta1) * g_i``. The new momentum is ``m' = Q((1 / n) sum_i Q(m_i))``, with
    ``Q`` = ``MinMaxUInt8``, between slices as in ``ScatterGatherReducer``. The gradient of each parameter
    then becomes the one that leads to it, ``(m' - beta1 * m) / (1 - beta1)``, so clipping, a
    ``GradScaler`` and a skipped update mean what they always do. ``QAdamOptimizer`` does the rest, and says
    what becomes of elements that had no gradient in the warm-up.

    A quarter of the bytes of a float32 allreduce. Steps of the warm-up are backward passes; an update
    that a ``GradScaler`` skips is one, too.

    Args:
        q_adam_optimizer: the optimizer of the model; None finds it among those that the model is wrapped
            with. It is not part of the printed form, is not compared, and is left out by pickle.
        hierarchical: sum inside each host in full precision, and compress between hosts only.

    Raises:
        InvalidTypeError: an option of a wrong type.
        ConfigurationError: when a model is wrapped: a parameter that no ``QAdamOptimizer`` owns, or
            several with different warm-ups.

    Example:
        >>> QAdamAlgorithm(hierarchical=False)
        QAdamAlgorithm(hierarchical=False)

    Paper: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's
    Convergence Speed", ICML 2021; Gan et al., "BAGUA: Scaling up Distributed Learning with System
    Relaxations", VLDB 2022.
    """

    @property
    def reducer(self) -> SumReducer:
        """Scatter and gather of bytes."""
        return ScatterGatherReducer(MinMaxUInt8())


@dataclass(frozen=True)
class Momenta(What):
    """What momenta become with the gradients of this step: ``m + (1 - beta1) (g - m)``, times their scaling."""

    reads: ClassVar[frozenset[str]] = frozenset({"gradients"})
    in_place: ClassVar[bool] = True

    def fill(self, flight: Flight) -> None:
        """Make momenta of the gradients where they lie: this rank's share of their mean."""
        for beta1, gradients, momenta in _by_beta(flight):
            torch._foreach_mul_(gradients, 1 - beta1)
            torch._foreach_add_(gradients, momenta, alpha=beta1 * flight.loss_scale * flight.scale)
        if scalings := _scalings(flight):
            torch._foreach_mul_(flight.bucket.gradient_views, scalings)


@dataclass(frozen=True)
class MomentaToGradients(Then):
    """The gradients with which the optimizer arrives at the mean momenta: ``(m' - beta1 m) / (1 - beta1)``."""

    replaces: ClassVar[bool] = True

    def check(self, exchange: Exchange) -> None:
        """Refuse a lag: the momentum is needed before and after."""
        if exchange.lag:
            raise ConfigurationError(
                f"{exchange.what!r} is needed in the same step: {exchange!r}",
                argument="lag",
                expected="at most 0",
                seen=exchange.lag,
                advice="Leave lag=0.",
            )

    def fold(self, flight: Flight) -> None:
        """Make them where they lie."""
        if scalings := _scalings(flight):
            torch._foreach_div_(flight.bucket.gradient_views, scalings)
        for beta1, gradients, momenta in _by_beta(flight):
            torch._foreach_add_(gradients, momenta, alpha=-beta1 * flight.loss_scale)
            torch._foreach_div_(gradients, 1 - beta1)


def _by_beta(flight: Flight) -> Iterator[tuple[float, list[torch.Tensor], list[torch.Tensor]]]:
    """Gradients and momenta of the parameters, by what the momentum decays with."""
    groups: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for parameter, gradient in zip(flight.bucket.parameters, flight.bucket.gradient_views, strict=True):
        owner, group = _owner_of(flight, parameter)
        gradients, momenta = groups.setdefault(group["betas"][0], ([], []))
        gradients.append(gradient)
        momenta.append(owner.momentum(parameter))
    return ((beta1, *lists) for beta1, lists in groups.items())


def _scalings(flight: Flight) -> list[float]:
    """What the momentum of each parameter is multiplied by; nothing where no optimizer scales any."""
    parameters = flight.bucket.parameters
    scalings = [_owner_of(flight, one)[0].scaling(one) for one in parameters]
    return scalings if any(one != 1.0 for one in scalings) else []


def _owner_of(flight: Flight, parameter: torch.Tensor) -> tuple[QAdamOptimizer, dict[str, Any]]:
    """The optimizer of ``parameter``, which ``check`` has found to be one, and its parameter group."""
    owner = flight.model.owner_of(parameter)
    assert owner is not None
    assert isinstance(owner[0], QAdamOptimizer)
    return owner[0], owner[1]


QAdamAlgorithmImpl = bound_form(QAdamAlgorithm)


def _warmup_steps(model: Model) -> int:
    warmups = {optimizer.warmup_steps for optimizer in model.optimizers if isinstance(optimizer, QAdamOptimizer)}
    if len(warmups) > 1:
        raise ConfigurationError(
            "optimizers of one model end their warm-up together",
            argument="optimizers",
            expected="one number of warmup_steps",
            seen=sorted(warmups),
        )
    return next(iter(warmups), 0)
