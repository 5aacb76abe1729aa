"""All ranks in one process, in plain torch: what algorithms are written down on, to compare ranks with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.harness import Losses, OptimizerMaker, State, assert_close, loss_of, mlp, snapshot


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class Replicas:
    """A model and an optimizer for each rank.

    Args:
        size: number of ranks.
        make_optimizer: makes each optimizer.
        make: makes each model.
        losses: loss of a model, on a rank, in a step.
    """

    def __init__(
        self,
        size: int,
        make_optimizer: OptimizerMaker = plain_sgd,
        make: Callable[[], nn.Module] = mlp,
        losses: Losses = loss_of,
    ) -> None:
        self.models = [make() for _ in range(size)]
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]
        self.named = [dict(model.named_parameters()) for model in self.models]
        self.losses = losses

    def backward(self, number: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            self.losses(model, rank, number).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self, number: int) -> None:
        """Each rank by itself."""
        self.backward(number)
        self.update()

    @property
    def rows(self) -> torch.Tensor:
        """The weights, a row for each rank."""
        return torch.stack([nn.utils.parameters_to_vector(one.parameters()).detach() for one in self.models])

    @rows.setter
    def rows(self, rows: torch.Tensor) -> None:
        for one, row in zip(self.models, rows.expand(len(self.models), -1), strict=True):
            nn.utils.vector_to_parameters(row.clone(), one.parameters())

    @property
    def mean(self) -> torch.Tensor:
        return self.rows.mean(dim=0)

    def weights(self) -> list[State]:
        return [{name: one.detach().clone() for name, one in named.items()} for named in self.named]

    def states(self) -> list[State]:
        return [snapshot(model) for model in self.models]

    def assert_equals(self, results: Sequence[State]) -> None:
        for result, expected in zip(results, self.states(), strict=True):
            assert_close(result, expected)


class Anchored(Replicas):
    """Ranks whose weights are put to an anchor that an outer optimizer steps.

    Args:
        size: number of ranks.
        outer: makes the outer optimizer.
        more: further arguments of ``Replicas``.
    """

    def __init__(self, size: int, outer: Callable[..., torch.optim.Optimizer], **more) -> None:
        super().__init__(size, **more)
        self.anchor = nn.Parameter(self.rows[0])
        self.outer = outer([self.anchor])

    def outer_step(self) -> None:
        self.anchor.grad = (self.anchor.detach() - self.rows).mean(dim=0)
        self.outer.step()
        self.rows = self.anchor.detach()


#: The outer optimizer of DiLoCo as its paper has it.
nesterov = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
