"""Small algorithms that use one feature of the contract each: a lag, a memory, a phase, an own optimizer, a clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl, Bucketing, QAdamAlgorithm, QAdamAlgorithmImpl, Traits
from bagua.buckets import Bucket
from bagua.comm import ProcessGroup, ReduceOp, Work
from bagua.optim import QAdamOptimizer


@dataclass(frozen=True)
class DelayedGossip(Algorithm):
    """Mix weights with one neighbour on a ring, which changes with the step; the result is used a step later."""


class DelayedGossipImpl(AlgorithmImpl, declaration=DelayedGossip):
    traits = Traits(result="consensus", gathers_gradients=False)
    lag = 1

    def fill(self, bucket: Bucket, step: int) -> None:
        bucket.read_weights(bucket.buffer())
        bucket.buffer("sent").copy_(bucket.buffer())

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        peer = self.peer(group.rank, group.size, step)
        if peer == group.rank:
            return
        received = torch.empty_like(bucket.buffer())
        group.global_communicator.sendrecv(received, bucket.buffer(), peer, peer)
        bucket.buffer().add_(received).div_(2)

    @staticmethod
    def peer(rank: int, size: int, step: int) -> int:
        """Ranks (0, 1), (2, 3), ... in even steps, (1, 2), (3, 4), ... in odd ones; on a ring if the size is even."""
        other = rank + 1 if (rank + step) % 2 == 0 else rank - 1
        if size % 2 == 0:
            return other % size
        return other if 0 <= other < size else rank

    def apply(self, bucket: Bucket, step: int) -> None:
        change = bucket.buffer() - bucket.buffer("sent")
        bucket.write_weights(bucket.read_weights(torch.empty_like(change)) + change)


@dataclass(frozen=True)
class Rounded(Algorithm):
    """Gradient allreduce with gradients rounded to multiples of ``grain``; what is cut off comes with the next ones."""

    grain: float = 2.0**-9


class RoundedImpl(AlgorithmImpl, declaration=Rounded):
    traits = Traits(result="bounded")

    @property
    def gradient_scale(self) -> float:
        return 1.0 / self.process_group.size

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        return {"residual": bucket.empty(), "committed": torch.zeros(1, dtype=torch.int64)}

    def fill(self, bucket: Bucket, step: int) -> None:
        bucket.gradients.add_(bucket.state["residual"], alpha=self.loss_scale)

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> Work | None:
        grain = self.options.grain * self.loss_scale
        sent = bucket.gradients.div(grain).round_().mul_(grain)
        bucket.buffer("residual").copy_(bucket.gradients - sent).div_(self.loss_scale)
        bucket.gradients.copy_(sent)
        return group.global_communicator.allreduce(bucket.gradients, async_op=True)

    def apply(self, bucket: Bucket, step: int) -> None:
        if torch.isfinite(bucket.gradients).all():
            bucket.state["residual"].copy_(bucket.buffer("residual"))
            bucket.state["committed"] += 1


@dataclass(frozen=True)
class LocalSgd(Algorithm):
    """Average the weights after every ``period``-th update; no communication in between."""

    period: int = 2


class LocalSgdImpl(AlgorithmImpl, declaration=LocalSgd):
    traits = Traits(result="consensus", gathers_gradients=False, after_optimizer=True)

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        return step % self.options.period == self.options.period - 1

    def fill(self, bucket: Bucket, step: int) -> None:
        bucket.read_weights(bucket.buffer())

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        group.global_communicator.allreduce(bucket.buffer(), ReduceOp.AVG)

    def apply(self, bucket: Bucket, step: int) -> None:
        bucket.write_weights(bucket.buffer())


@dataclass(frozen=True)
class OwnSgd(Algorithm):
    """Step each bucket with its own gradients during backward, then average the weights."""

    learning_rate: float = 0.1


class OwnSgdImpl(AlgorithmImpl, declaration=OwnSgd):
    traits = Traits(result="exact", owns_optimizers=True, active_alone=True)

    def local_step(self, bucket: Bucket, step: int) -> None:
        weights = bucket.read_weights(torch.empty_like(bucket.gradients))
        bucket.write_weights(weights.sub_(bucket.gradients, alpha=self.options.learning_rate))

    def fill(self, bucket: Bucket, step: int) -> None:
        bucket.read_weights(bucket.buffer())

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        group.global_communicator.allreduce(bucket.buffer(), ReduceOp.AVG)

    def apply(self, bucket: Bucket, step: int) -> None:
        bucket.write_weights(bucket.buffer())


@dataclass(frozen=True)
class ByTheClock(Algorithm):
    """Exchange whenever the clock of this rank shows a multiple of ``interval_s``. Other ranks are not waited for."""

    interval_s: int = 6


class ByTheClockImpl(AlgorithmImpl, declaration=ByTheClock):
    traits = Traits(result="consensus", rank_local=True, gathers_gradients=False)

    def __init__(self, process_group: ProcessGroup, *arguments: Any, **options: Any) -> None:
        super().__init__(process_group, *arguments, **options)
        self.exchanged: Counter[int] = Counter()

    def is_due(self, step: int, bucket: Bucket, now: float) -> bool:
        return now % self.options.interval_s == 0

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        self.exchanged[step] += 1


@dataclass(frozen=True)
class WarmsUp(Algorithm):
    """Gradient allreduce in many buckets first, in one bucket after ``warmup_steps``."""

    warmup_steps: int = 3


class WarmsUpImpl(AlgorithmImpl, declaration=WarmsUp):
    traits = Traits(result="exact")

    @property
    def gradient_scale(self) -> float:
        return 1.0 / self.process_group.size

    def phase(self, step: int) -> bool:
        return step < self.options.warmup_steps

    def bucketing(self, step: int) -> Bucketing:
        return Bucketing() if self.phase(step) else Bucketing(one_bucket=True, chunked=True)

    def init_state(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        return {"total": bucket.empty()}

    def exchange(self, bucket: Bucket, group: ProcessGroup, step: int) -> None:
        group.global_communicator.allreduce(bucket.gradients)

    def apply(self, bucket: Bucket, step: int) -> None:
        bucket.state["total"] += bucket.gradients


class QuickToWarmUp(QAdamOptimizer):
    """Its warm-up ends within a test. What is hardly estimated must not become a divisor, so ``eps`` is large."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr, warmup_steps=2, eps=0.01)


class QuickQAdam(QAdamAlgorithm):
    """QAdam that soon compresses."""

    optimizer_class = QuickToWarmUp


class QuickQAdamImpl(QAdamAlgorithmImpl, declaration=QuickQAdam):
    pass
