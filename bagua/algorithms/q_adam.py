"""Adam that, after a warm-up, exchanges its momentum in one byte for each element."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, ClassVar

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Traits
from bagua.algorithms.reduced import padding
from bagua.buckets import Bucket
from bagua.checks import check_flags, check_kind
from bagua.comm import Group, ProcessGroup, Work
from bagua.compression import MinMaxUInt8
from bagua.errors import ConfigurationError
from bagua.optim import QAdamOptimizer
from bagua.primitives import ReducerMemory, ScatterGatherReducer, allreduce_sum, reducer_sum

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl"]


@dataclass(frozen=True)
class QAdamAlgorithm(Algorithm):
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

    q_adam_optimizer: QAdamOptimizer | None = field(default=None, repr=False, compare=False)
    hierarchical: bool = True

    optimizer_class: ClassVar[Callable[..., torch.optim.Optimizer] | None] = QAdamOptimizer

    def __post_init__(self) -> None:
        check_kind((QAdamOptimizer, NoneType), "a QAdamOptimizer, or None", q_adam_optimizer=self.q_adam_optimizer)
        check_flags(hierarchical=self.hierarchical)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the optimizer would be of no use: it would own copies of the parameters.
        return type(self), (None, self.hierarchical)


class QAdamAlgorithmImpl(AlgorithmImpl, declaration=QAdamAlgorithm):
    """``QAdamAlgorithm`` on a group."""

    traits = Traits(result="bounded")
    options: QAdamAlgorithm

    def __init__(self, process_group: Group | None, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self._reducer = ScatterGatherReducer(MinMaxUInt8())
        self._memories: weakref.WeakKeyDictionary[Bucket, ReducerMemory] = weakref.WeakKeyDictionary()
        self._owners: dict[int, tuple[QAdamOptimizer, int]] = {}
        self._warmup_steps = 0

    def check_model(
        self, parameters: Mapping[str, torch.nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Find the optimizer of each parameter, and refuse parameters that have none of the right kind."""
        chosen = self.options.q_adam_optimizer
        if chosen is not None and not any(chosen is optimizer for optimizer in optimizers):
            raise ConfigurationError(
                "this optimizer is not one of those that the model is wrapped with",
                argument="q_adam_optimizer",
                expected="the model's optimizer",
                seen=f"another {type(chosen).__name__}",
                advice="Give both with_bagua and the algorithm the same object, or leave it out in the algorithm.",
            )
        suited = [optimizer for optimizer in optimizers if isinstance(optimizer, QAdamOptimizer)]
        self._owners = {id(parameter): owner for optimizer in suited for parameter, owner in _owned_by(optimizer)}
        for name, parameter in parameters.items():
            self._reducer.check_dtype(parameter.dtype)
            if id(parameter) not in self._owners:
                raise _without_owner(name, optimizers)
        self._warmup_steps = _one_warmup([optimizer.warmup_steps for optimizer in suited])

    @property
    def gradient_scale(self) -> float:
        """Of a mean."""
        return 1.0 / self.process_group.size

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Nothing: the momentum is remembered by the optimizer."""
        flat = bucket.allocate_gradients()
        self._memories[bucket] = self._reducer.memory(bucket.communicator, flat, padding=padding(bucket))
        return {}

    def fill(self, bucket: Bucket, step: int) -> None:
        """Make momenta of the gradients: this rank's share of their mean."""
        if step < self._warmup_steps:
            return
        for beta1, gradients, momenta in self._by_beta(bucket):
            torch._foreach_mul_(gradients, 1 - beta1)
            torch._foreach_add_(gradients, momenta, alpha=beta1 * self.loss_scale * self.gradient_scale)

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        """Sum exactly, or compressed."""
        flat, hierarchical = bucket.allocate_gradients(), self.options.hierarchical
        if step < self._warmup_steps:
            return allreduce_sum(flat, group, hierarchical=hierarchical, async_op=True)
        memory = self._memories[bucket]
        reducer_sum(flat, group, self._reducer, memory, hierarchical=hierarchical)
        memory.clear_padding(flat)  # A block that is not finite made it NaN, which would spoil all steps to come.
        return None

    def apply(self, bucket: Bucket, step: int) -> None:
        """Make gradients of the mean momenta: those with which the optimizer arrives there."""
        if step < self._warmup_steps:
            return
        for beta1, gradients, momenta in self._by_beta(bucket):
            torch._foreach_add_(gradients, momenta, alpha=-beta1 * self.loss_scale)
            torch._foreach_div_(gradients, 1 - beta1)

    def _by_beta(self, bucket: Bucket) -> Iterator[tuple[float, list[torch.Tensor], list[torch.Tensor]]]:
        """Gradients and momenta of the parameters, by what the momentum decays with."""
        groups: dict[float, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for parameter, gradient in zip(bucket.parameters, bucket.gradient_views, strict=True):
            optimizer, number = self._owners[id(parameter)]
            beta1 = optimizer.param_groups[number]["betas"][0]
            gradients, momenta = groups.setdefault(beta1, ([], []))
            gradients.append(gradient)
            momenta.append(optimizer.momentum(parameter))
        return ((beta1, *lists) for beta1, lists in groups.items())


def _owned_by(optimizer: QAdamOptimizer) -> Iterator[tuple[torch.Tensor, tuple[QAdamOptimizer, int]]]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield parameter, (optimizer, number)


def _one_warmup(warmups: Sequence[int]) -> int:
    if len(set(warmups)) > 1:
        raise ConfigurationError(
            "optimizers of one model end their warm-up together",
            argument="optimizers",
            expected="one number of warmup_steps",
            seen=sorted(set(warmups)),
        )
    return warmups[0] if warmups else 0


def _without_owner(name: str, optimizers: Sequence[torch.optim.Optimizer]) -> ConfigurationError:
    return ConfigurationError(
        f"no QAdamOptimizer steps {name}",
        argument="optimizers",
        expected="a QAdamOptimizer of all trainable parameters",
        seen=[type(optimizer).__name__ for optimizer in optimizers],
        advice="Build QAdamOptimizer(model.parameters()) and wrap the model with it.",
    )
