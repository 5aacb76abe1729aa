"""DiLoCo around an optimizer with memory, weight decay and a schedule, against a loop of ten lines."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from bagua.algorithms import DiLoCoAlgorithm
from tests.algorithms.replicas import Anchored
from tests.harness import State, batch, mlp
from tests.parallel.wrapping import Loop

RANKS, STEPS, TOGETHER, EVERY = 3, 31, 7, 4


def double() -> nn.Module:
    return mlp().double()


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = (one.double() for one in batch(rank, step))
    return nn.functional.mse_loss(model(inputs), targets)


class Inner(torch.optim.AdamW):
    """AdamW whose learning rate falls to nearly nothing."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self, lambda step: 0.505 + 0.495 * math.cos(math.pi * step / STEPS)
        )


def train() -> list[State]:
    loop = Loop("with_bagua", double, Inner, losses=loss, algorithm=DiLoCoAlgorithm(EVERY, start_after=TOGETHER))
    watched = []
    for _ in range(STEPS):
        watched.append(loop.train())
        loop.optimizer.schedule.step()
    return watched


def test_diloco_around_adam_is_that_of_the_paper_in_every_step(thread_ranks):
    """Adam's moments, its weight decay and its schedule stay each rank's own, and go on across outer steps."""
    watched = thread_ranks(RANKS, train)
    outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
    expected = Anchored(RANKS, outer, make_optimizer=Inner, make=double, losses=loss)
    for step in range(STEPS):
        expected.backward(step)
        if step < TOGETHER:
            for same in zip(*(model.parameters() for model in expected.models), strict=True):
                mean = torch.stack([one.grad for one in same]).mean(dim=0)
                for one in same:
                    one.grad = mean.clone()
        expected.update()
        if step == TOGETHER - 1:
            expected.anchor.data.copy_(expected.mean)
        elif step >= TOGETHER and (step + 1 - TOGETHER) % EVERY == 0:
            expected.outer_step()
        for optimizer in expected.optimizers:
            optimizer.schedule.step()
        for states, state in zip(watched, expected.states(), strict=True):
            torch.testing.assert_close(states[step], state, rtol=1e-10, atol=1e-12)
