"""All ranks of ``DecentralizedDataParallel`` in one process, in plain PyTorch: what the wrapper must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import bagua.comm
from bagua.optim import optim_fn_accum_adamw, optim_fn_adamw
from bagua.parallel.decentralized import DecentralizedDataParallel
from tests.algorithms.replicas import Replicas
from tests.harness import State, loss_of, mlp, snapshot

#: Makes three buckets of the small model.
BUCKET_MB = 1000 / 2**20

Matrices = Callable[[int], torch.Tensor]


def momentum(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)


def plain_sgd(named):
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05)


def adamw(named):
    return optim_fn_adamw(named, lr=0.01)


def accum_adamw(named):
    return optim_fn_accum_adamw(named, lr=0.01, accum_iter=3)


OPTIMIZERS = {"momentum": momentum, "adamw": adamw, "accum_adamw": accum_adamw}


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def wrap(seed: int | None = None, **options: Any) -> DecentralizedDataParallel:
    """The small model on this rank; ranks begin with different weights, and rank 0's must win."""
    model = mlp(bagua.comm.get_rank() if seed is None else seed)
    arguments = {"optim_fn": momentum, "bucket_size_in_mb": BUCKET_MB, **options}
    return DecentralizedDataParallel(model, **arguments)


def train(model: nn.Module, steps: Sequence[int], scaler: torch.amp.GradScaler | None = None) -> list[State]:
    """The loop of a user; the weights after each step."""
    rank = bagua.comm.get_rank()
    states = []
    for step in steps:
        loss = loss_of(model, rank, step)
        (loss if scaler is None else scaler.scale(loss)).backward()
        states.append(snapshot(model))
    return states


class Simulation(Replicas):
    """Every rank's model and optimizers, stepped together.

    Args:
        size: number of ranks.
        layout: names of the parameters of each bucket.
        matrices: the mixing matrix of each round, from 1.
        optim_fn: as for the wrapper.
        lr_scheduler_fn: as for the wrapper.
        clip: as ``grad_clip_norm``.
        scaled: each rank has a ``GradScaler``.
    """

    def __init__(
        self,
        size: int,
        layout: Sequence[Sequence[str]],
        matrices: Matrices,
        optim_fn: Callable[..., torch.optim.Optimizer] = momentum,
        lr_scheduler_fn: Callable[..., Any] | None = None,
        clip: float = 0.0,
        scaled: bool = False,
    ) -> None:
        super().__init__(size)
        self.layout = layout
        self.matrices = matrices
        self.optimizers = [
            [optim_fn([(name, named[name]) for name in bucket]) for bucket in layout] for named in self.named
        ]
        self.schedules = [
            [lr_scheduler_fn(optimizer) for optimizer in optimizers] if lr_scheduler_fn else []
            for optimizers in self.optimizers
        ]
        self.clip = clip
        self.scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(size)]
        self.scaled = scaled
        self.steps_taken = 0

    def step(self, step: int, spoil: Callable[[int, torch.Tensor], torch.Tensor] = lambda rank, loss: loss) -> None:
        """One step of all ranks; ``spoil`` may change a rank's loss."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            loss = spoil(rank, loss_of(model, rank, step))
            (self.scalers[rank].scale(loss) if self.scaled else loss).backward()
        if self.steps_taken:
            self.rows = (self.matrices(self.steps_taken) @ self.rows.double()).float()
        for rank in range(len(self.models)):
            self._update(rank)
        self.steps_taken += 1

    def _update(self, rank: int) -> None:
        scaler, optimizers, named = self.scalers[rank], self.optimizers[rank], self.named[rank]
        if self.clip:
            for optimizer in optimizers if self.scaled else ():
                scaler.unscale_(optimizer)
            for names in self.layout:
                nn.utils.clip_grad_norm_([named[name] for name in names], self.clip)
        for optimizer in optimizers:
            if self.scaled:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaled:
            scaler.update()
        for schedule in self.schedules[rank]:
            schedule.step()
