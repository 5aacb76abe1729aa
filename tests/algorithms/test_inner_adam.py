"""DiLoCo around an optimizer with memory, weight decay and a schedule, against a loop of ten lines."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import DiLoCoAlgorithm
from bagua.parallel import with_bagua
from tests.harness import batch, mlp, snapshot

RANKS, STEPS, TOGETHER = 3, 31, 7


class Inner:
    """AdamW whose learning rate falls to nearly nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 0.505 + 0.495 * math.cos(math.pi * step / STEPS)
        )

    def backward(self, called: nn.Module, rank: int, step: int) -> None:
        self.optimizer.zero_grad()
        inputs, targets = (one.double() for one in batch(rank, step))
        nn.functional.mse_loss(called(inputs), targets).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()


def train(every: int) -> list[dict[str, torch.Tensor]]:
    rank = bagua.comm.get_rank()
    inner = Inner(mlp().double())
    wrapped = with_bagua(inner.model, [inner.optimizer], DiLoCoAlgorithm(every, start_after=TOGETHER))
    watched = []
    for step in range(STEPS):
        inner.backward(wrapped, rank, step)
        inner.step()
        watched.append(snapshot(inner.model))
    return watched


def plainly(every: int, lr: float, momentum: float) -> Iterator[list[Inner]]:
    """All ranks in one process after each step, by nothing but what the paper says."""
    ranks = [Inner(mlp().double()) for _ in range(RANKS)]
    same = list(zip(*(one.model.parameters() for one in ranks), strict=True))
    for step in range(STEPS):
        for rank, one in enumerate(ranks):
            one.backward(one.model, rank, step)
        if step < TOGETHER:
            average_gradients(same)
        for one in ranks:
            one.step()
        if step == TOGETHER - 1:
            anchor = [copies[0].detach().clone().requires_grad_() for copies in same]
            outer = torch.optim.SGD(anchor, lr=lr, momentum=momentum, nesterov=True)
        elif step >= TOGETHER and (step + 1 - TOGETHER) % every == 0:
            step_outside(anchor, outer, same)
        yield ranks


@torch.no_grad()
def average_gradients(same: list[tuple[nn.Parameter, ...]]) -> None:
    for copies in same:
        mean = torch.stack([one.grad for one in copies]).mean(dim=0)
        for one in copies:
            one.grad = mean.clone()


@torch.no_grad()
def step_outside(anchor: list[torch.Tensor], outer: torch.optim.SGD, same: list[tuple[nn.Parameter, ...]]) -> None:
    for place, copies in zip(anchor, same, strict=True):
        place.grad = place.detach() - torch.stack(copies).mean(dim=0)
    outer.step()
    for place, copies in zip(anchor, same, strict=True):
        for one in copies:
            one.copy_(place)


@pytest.mark.threads
def test_diloco_around_adam_is_that_of_the_paper_in_every_step(thread_ranks):
    """Adam's moments, its weight decay and its schedule stay each rank's own, and go on across outer steps."""
    watched = thread_ranks(RANKS, train, 4)
    for step, expected in enumerate(plainly(4, lr=0.7, momentum=0.6)):
        for rank, one in enumerate(expected):
            torch.testing.assert_close(watched[rank][step], snapshot(one.model), rtol=1e-10, atol=1e-12)
