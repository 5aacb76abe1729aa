"""Small algorithms that use one feature of exchanges each: a lag, a memory, a phase, an own optimizer."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from bagua.algorithms import (
    Algorithm,
    Every,
    Exchange,
    Flight,
    Gradients,
    How,
    Mean,
    Model,
    OneBitAdamAlgorithm,
    OneBitLambAlgorithm,
    QAdamAlgorithm,
    Replace,
    Then,
    Weights,
)
from bagua.comm import ProcessGroup, Work
from bagua.optim import OneBitLambOptimizer, QAdamOptimizer
from bagua.primitives import ReducerMemory, State


@dataclass(frozen=True)
class RoundedMean(How):
    """Mean of what is rounded to multiples of ``grain``; what is cut off comes with the next."""

    grain: float

    contraction: ClassVar[float | None] = None  # type: ignore[misc]

    def state(self) -> tuple[State, ...]:
        return State("residual"), State("committed", _zero, per="flat", scope="shared")

    def scale(self, group: ProcessGroup) -> float:
        return 1.0 / group.size

    def run(self, flight: Flight, group: ProcessGroup) -> Work | None:
        flat, grain = flight.flat, self.grain * flight.loss_scale
        flat.add_(flight.state["residual"], alpha=flight.loss_scale)
        sent = flat.div(grain).round_().mul_(grain)
        flight.memory.propose("residual").copy_(flat - sent).div_(flight.loss_scale)
        flight.memory.propose("committed").copy_(flight.state["committed"] + 1)
        flat.copy_(sent)
        return group.global_communicator.allreduce(flat, async_op=True)


def _zero(_: ReducerMemory) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64)


@dataclass(frozen=True)
class Rounded(Algorithm):
    """Gradient allreduce with gradients rounded to multiples of ``grain``; what is cut off comes with the next ones."""

    grain: float = 2.0**-9

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        return (Exchange(Gradients(), Every(), RoundedMean(self.grain), Replace()),)


@dataclass(frozen=True)
class LocalSgd(Algorithm):
    """Average the weights after every ``period``-th update; no communication in between."""

    period: int = 2

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        return (Exchange(Weights(), Every(self.period), Mean(), Replace()),)


@dataclass(frozen=True)
class Descend(Then):
    """A local action: step each bucket with its own gradients."""

    learning_rate: float

    def fold(self, flight: Flight) -> None:
        bucket = flight.bucket
        weights = bucket.read_weights(torch.empty_like(bucket.gradients))
        bucket.write_weights(weights.sub_(bucket.gradients, alpha=self.learning_rate))


@dataclass(frozen=True)
class OwnSgd(Algorithm):
    """Step each bucket with its own gradients during backward, then average the weights."""

    learning_rate: float = 0.1

    def exchanges(self, phase: Hashable = 0) -> tuple[Exchange, ...]:
        step = Exchange(Gradients(), Every(), None, Descend(self.learning_rate), label="step")
        return step, Exchange(Weights(), Every(), Mean(), Replace(), at="bucket stepped", until="backward ends")


@dataclass(frozen=True)
class ChunkedMean(Mean):
    """A mean that wants its buckets to split evenly over the ranks."""

    chunked: ClassVar[bool] = True


@dataclass(frozen=True)
class Total(Then):
    """The result takes the place of the gradients, and is added up."""

    replaces: ClassVar[bool] = True

    def state(self) -> tuple[State, ...]:
        return (State("total", scope="shared"),)

    def fold(self, flight: Flight) -> None:
        flight.state["total"] += flight.flat


@dataclass(frozen=True)
class WarmsUp(Algorithm):
    """Gradient allreduce, in buckets that split evenly over the ranks after ``warmup_steps``."""

    warmup_steps: int = 3

    @property
    def phases(self) -> tuple[Hashable, ...]:
        return "warm-up", "chunked"

    def phase(self, step: int, model: Model) -> Hashable:
        return "warm-up" if step < self.warmup_steps else "chunked"

    def exchanges(self, phase: Hashable = "chunked") -> tuple[Exchange, ...]:
        how = Mean() if phase == "warm-up" else ChunkedMean()
        return (Exchange(Gradients(), Every(), how, Total()),)


class QuickToWarmUp(QAdamOptimizer):
    """Its warm-up ends within a test. What is hardly estimated must not become a divisor, so ``eps`` is large."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, warmup_steps=2, eps=0.01)


class QuickQAdam(QAdamAlgorithm):
    """QAdam that soon compresses."""

    optimizer_class = QuickToWarmUp


class QuickOneBitAdam(OneBitAdamAlgorithm):
    """One-bit Adam that soon compresses."""

    optimizer_class = QuickToWarmUp


class QuickLamb(OneBitLambOptimizer):
    """Its warm-up ends within a test."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, warmup_steps=2, eps=0.01)


class QuickOneBitLamb(OneBitLambAlgorithm):
    """One-bit LAMB that soon compresses."""

    optimizer_class = QuickLamb
