"""What the engine owes an algorithm, shown on toys that use one feature of exchanges each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from bagua import primitives
from bagua.algorithms import (
    Algorithm,
    Every,
    Exchange,
    Flight,
    GradientAllReduceAlgorithm,
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
from bagua.parallel import with_bagua
from bagua.primitives import ReducerMemory
from tests.algorithms.replicas import plain_sgd
from tests.harness import (
    State,
    assert_close,
    mlp,
    reference,
    snapshot,
)
from tests.parallel.wrapping import Loop, assert_trained


@dataclass(frozen=True)
class RoundedMean(How):
    """Mean of what is rounded to multiples of ``grain``; what is cut off comes with the next."""

    grain: float

    contraction: ClassVar[float | None] = None  # type: ignore[misc]

    def state(self) -> tuple[primitives.State, ...]:
        return primitives.State("residual"), primitives.State("committed", _zero, per="flat", scope="shared")

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

    def state(self) -> tuple[primitives.State, ...]:
        return (primitives.State("total", scope="shared"),)

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


def _loop(algorithm: Algorithm) -> Loop:
    return Loop("with_bagua", make_optimizer=plain_sgd, algorithm=algorithm)


@pytest.mark.parametrize("completes", ["forward", "state_dict", "bagua_state_dict", "with_bagua"])
def test_what_an_update_that_is_skipped_everywhere_owes_is_exchanged_later(thread_ranks, completes):
    def train() -> list[torch.Tensor]:
        loop = _loop(LocalSgd(period=1))
        weight = loop.model[0].weight
        with torch.no_grad():
            weight += loop.rank  # Something to be averaged.
        loop.backward()
        before = weight.detach().clone()
        {
            "forward": loop.loss,
            "state_dict": loop.wrapped.state_dict,
            "bagua_state_dict": loop.wrapped.bagua_state_dict,
            "with_bagua": lambda: with_bagua(loop.model, [loop.optimizer], GradientAllReduceAlgorithm()),
        }[completes]()
        return [before, weight.detach().clone()]

    first, second = thread_ranks(2, train)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_forwards_for_evaluation_owe_nothing_and_complete_nothing(thread_ranks):
    def train() -> torch.Tensor:
        loop = _loop(LocalSgd(period=1))
        with torch.no_grad():
            loop.model[0].weight += loop.rank
        loop.backward()
        if loop.rank == 0:
            loop.wrapped.eval()
            with torch.no_grad():
                loop.loss()
            loop.wrapped.train()
        return loop.model[0].weight.detach().clone()

    first, second = thread_ranks(2, train)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("size", [1, 3])
def test_an_algorithm_that_owns_the_optimizer_steps_during_backward(thread_ranks, size):
    def train() -> State:
        loop = Loop(lambda model, _: with_bagua(model, [], OwnSgd(), bucket_bytes=1000))
        for _ in range(5):
            loop.model.zero_grad()
            loop.backward()
        return snapshot(loop.model)

    assert_trained(thread_ranks(size, train), reference(mlp(), plain_sgd, size, range(5)))


def test_a_change_of_phase_forms_new_buckets_if_it_must_and_carries_memory_over(thread_ranks):
    def train() -> tuple[list[list[int]], State, State]:
        loop, sizes, totals = Loop("with_bagua", algorithm=WarmsUp(warmup_steps=3)), [], {}
        for _ in range(6):
            loop.train()
            sizes.append([bucket.numel % 6 for bucket in loop.wrapped.bagua_buckets])
            for name, parameter in loop.model.named_parameters():
                totals[name] = totals.get(name, 0) + parameter.grad
        remembered = loop.wrapped.bagua_state_dict()["parameters"]
        saved = {name: state["total"] for name, state in remembered.items()}
        return sizes, saved, totals

    results = thread_ranks(3, train)
    for sizes, saved, totals in results:
        assert sizes[2] != [0, 0], "padded before it is needed"
        assert sizes[3:] == [[0, 0]] * 3, "three ranks, two numbers of eight bytes"
        assert_close(saved, {name: totals[name] for name in saved})
