"""Bad input to ``DecentralizedDataParallel`` gets typed errors, and errors on one rank end the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bagua.comm
from bagua import topology
from bagua.errors import (
    BaguaError,
    CollectiveMismatchError,
    CommunicationError,
    ConfigurationError,
)
from bagua.parallel.decentralized import DecentralizedDataParallel
from tests.harness import loss_of, mlp
from tests.parallel.decentralized_simulation import momentum, plain_sgd, train, wrap
from tests.parallel.wrapping import on_ranks
from tests.topologies import Made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": Made(lambda size, number, nodes: [[1.0, 0.0], [1.0, 0.0]])}, "do not sum to 1"),
        ({"topology": Made(lambda size, number, nodes: [topology.Edge((0,), 1.0)])}, "exactly one edge"),
    ],
)
@on_ranks(2)
def test_topologies_that_do_not_fit(options, message):
    with pytest.raises(ConfigurationError, match=message):
        wrap(**options)


def drops_biases(named):
    return torch.optim.SGD([parameter for name, parameter in named if "bias" not in name] or [nn.Parameter()], lr=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim_fn": drops_biases}, r"none for .*4\.bias"),
        ({"optim_fn": lambda named: [parameter for _, parameter in named]}, "list"),
        (
            {"optim_fn": lambda named: torch.optim.SGD([*(p for _, p in named), nn.Parameter(torch.ones(1))], lr=0.1)},
            "1 more",
        ),
        ({"lr_scheduler_fn": lambda optimizer: 0.1}, "float"),
    ],
)
@on_ranks(2)
def test_functions_that_make_something_else(options, message):
    model = wrap(**options)
    with pytest.raises(ConfigurationError, match=message):
        train(model, [0])


ONE_OR_ANOTHER = Made(lambda *_: topology.Complete().matrix(2) if bagua.comm.get_rank() else torch.eye(2))


@pytest.mark.parametrize(
    ("of_all", "of_rank_1", "message"),
    [
        ({"topology": ONE_OR_ANOTHER}, {}, "topologies"),
        ({}, {"topology": "ring"}, "AlternatingRing"),
        ({}, {"grad_clip_norm": 1.0}, "clip"),
        ({}, {"make": lambda: nn.Linear(8, 4)}, "weight"),
    ],
    ids=["topologies", "names", "options", "models"],
)
@on_ranks(2)
def test_what_differs_between_ranks(of_all, of_rank_1, message):
    options = {**of_all, **(of_rank_1 if bagua.comm.get_rank() else {})}
    model = options.pop("make", mlp)()
    with pytest.raises(CollectiveMismatchError, match=message):
        DecentralizedDataParallel(model, momentum, **options)


class TwoWays(nn.Module):
    """Two layers that are used in the order that the caller wants."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor, turned: bool) -> torch.Tensor:
        first, second = (self.right, self.left) if turned else (self.left, self.right)
        return second(first(inputs))


@on_ranks(2)
def test_orders_that_differ():
    model = DecentralizedDataParallel(TwoWays(), momentum)
    with pytest.raises(CollectiveMismatchError, match=r"another order.*right\..*left\."):
        model(torch.ones(2, 8), turned=bagua.comm.get_rank() == 1).sum().backward()


class OptimizerError(Exception):
    """What a user's own optimizer raises in these tests."""


@pytest.mark.parametrize("at_step", [0, 2])
@on_ranks(2)
def test_an_error_in_an_optimizer_ends_every_rank(at_step):
    class Fails(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            if bagua.comm.get_rank() == 1 and self.steps == at_step:
                raise OptimizerError
            self.steps += 1
            return super().step(closure)

    rank = bagua.comm.get_rank()
    model = wrap(optim_fn=lambda named: Fails([parameter for _, parameter in named], lr=0.1))
    train(model, range(at_step))
    with pytest.raises(OptimizerError if rank == 1 else CommunicationError):
        train(model, range(at_step, at_step + 3))
    with pytest.raises(BaguaError):
        train(model, [9])


@on_ranks(2)
def test_an_optimizer_that_one_rank_cannot_make_ends_every_rank():
    def make(named):
        if bagua.comm.get_rank() == 1:
            raise OptimizerError
        return plain_sgd(named)

    rank = bagua.comm.get_rank()
    model = wrap(optim_fn=make)
    with pytest.raises(OptimizerError if rank == 1 else CommunicationError):
        train(model, range(2))
    with pytest.raises(BaguaError):
        loss_of(model, rank, 3).backward()


@on_ranks(6)
def test_errors_in_an_edge_of_several_ranks_end_all_of_it():
    """The communicators of edges break with that of the model."""
    rank = bagua.comm.get_rank()
    model = wrap(topology=Made(halves, static=True))
    train(model, range(2))
    if rank == 5:
        model.reducer.give_up("a test")
    elif rank in (3, 4):
        with pytest.raises(CommunicationError):
            train(model, range(2, 4))


def halves(size, step, nodes):
    """Two edges of three ranks."""
    return [topology.Edge((0, 1, 2), 1 / 3), topology.Edge((3, 4, 5), 1 / 3)]
