"""Algorithms of a user that send more than one tensor, which the engine knows nothing of: push-sum, and NoLoCo."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from bagua.algorithms import Algorithm, Difference, Every, Exchange, Flight, How, Replace, Then, Weights
from bagua.comm import ProcessGroup
from bagua.errors import ConfigurationError
from bagua.primitives import ReducerMemory, State
from tests.algorithms.replicas import Replicas, plain_sgd
from tests.algorithms.stacked import loss_of, model_of
from tests.contract.algorithms import AlgorithmContract
from tests.parallel.wrapping import Loop
from tests.topologies import DRAWN_PAIRS

SIZE = 4


# Push-sum. Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", 2019.


@dataclass(frozen=True)
class Push(How):
    """Each rank keeps half of its weights and of its mass. Rank 0 gives its other half to all others, these to it."""

    uniform: ClassVar[bool] = False  # type: ignore[misc]

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        message = torch.cat([flight.flat.double(), flight.state["mass"]])
        others = list(range(1, group.size)) if group.rank == 0 else [0]
        if not message.isfinite().all():
            others = []  # Who gives away what is not finite spoils all others.
        shares = torch.zeros(group.size, message.numel(), dtype=message.dtype)
        shares[others] = message / (2 * max(len(others), 1))
        shares[group.rank] = message - shares.sum(dim=0)
        received = torch.empty_like(shares)
        group.global_communicator.alltoall(received.view(-1), shares.view(-1))
        total = received.sum(dim=0)
        flight.flat.copy_(total[:-1])
        flight.memory.propose("mass").copy_(total[-1:])


def _one(_: ReducerMemory) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float64)


@dataclass(frozen=True)
class Weigh(Then):
    """Weights as the model has them, which are divided by the mass, or as they are sent and stepped, which are not."""

    for_model: bool

    def state(self) -> tuple[State, ...]:
        return (State("mass", _one, per="flat"),)

    def fold(self, flight: Flight) -> None:
        bucket, mass = flight.bucket, flight.state["mass"].item()
        bucket.write_weights(flight.flat / mass if self.for_model else flight.weights(bucket.empty()) * mass)


PUSH_SUM = (
    Exchange(None, Every(), None, Weigh(for_model=False), at="backward ends"),
    Exchange(Weights(), Every(), Push(), Weigh(for_model=True)),
)


class TestPushSum(AlgorithmContract):
    sizes = (1, 2, 3)

    @pytest.fixture
    def algorithm(self):
        return Algorithm.of(*PUSH_SUM)


def train(algorithm: Algorithm, steps: int) -> torch.Tensor:
    """The weights of this rank."""
    loop = Loop("with_bagua", model_of, plain_sgd, loss_of, algorithm=algorithm, bucket_bytes=1500)
    loop.train(steps)
    loop.wrapped.bagua_state_dict()
    return torch.nn.utils.parameters_to_vector(loop.model.parameters()).detach()


def push_sum(steps: int, *, steps_what_is_sent: bool = True) -> torch.Tensor:
    """``x <- A (x - lr g(x / w))``, ``w <- A w``; a row for each rank."""
    columns = torch.eye(SIZE, dtype=torch.float64) / 2
    columns[1:, 0] += 1 / 2 / (SIZE - 1)
    columns[0, 1:] += 1 / 2
    ranks = Replicas(SIZE, plain_sgd, model_of, loss_of)
    sent, mass = ranks.rows, torch.ones(SIZE, 1, dtype=torch.float64)
    for step in range(steps):
        ranks.rows = sent / mass
        updates = -ranks.rows
        ranks.step(step)
        updates += ranks.rows
        sent = columns @ (sent + updates * (1 if steps_what_is_sent else mass))
        mass = columns @ mass
    return sent / mass


def test_push_sum_is_what_the_paper_says(thread_ranks):
    found = torch.stack(thread_ranks(SIZE, train, Algorithm.of(*PUSH_SUM), 12))
    assert torch.allclose(found, push_sum(12), rtol=0, atol=1e-12)
    assert not torch.allclose(found, push_sum(12, steps_what_is_sent=False), rtol=0, atol=1e-4)


def test_exchanges_of_one_label_share_what_both_declare():
    """One of them may remember more."""
    local, sent = PUSH_SUM
    Algorithm.of(local, dataclasses.replace(sent, how=MeetOne()))
    with pytest.raises(ConfigurationError, match="different things under the name 'mass'"):
        dataclasses.replace(sent, how=Weighty())
    with pytest.raises(ConfigurationError, match="different things under one name"):
        Algorithm.of(local, dataclasses.replace(sent, how=Weighty(), then=Replace()))


# NoLoCo. Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025.


@dataclass(frozen=True)
class MeetOne(How):
    """The mean of two ranks, of what is sent and of their anchors; who meets whom changes with each round."""

    uniform: ClassVar[bool] = False  # type: ignore[misc]

    def state(self) -> tuple[State, ...]:
        return (State("anchors"),)

    def run(self, flight: Flight, group: ProcessGroup) -> None:
        message = torch.cat([flight.flat, flight.state["anchor"]])
        edges = DRAWN_PAIRS.round(group.size, flight.round, group.nodes).edges
        for one, other in (edge.ranks for edge in edges if group.rank in edge.ranks and len(edge.ranks) == 2):
            received, peer = torch.empty_like(message), one + other - group.rank
            group.global_communicator.sendrecv(received, message, peer, peer)
            message = (message + received) / 2
        sent, anchors = message.chunk(2)
        flight.flat.copy_(sent)
        flight.memory.propose("anchors").copy_(anchors)


@dataclass(frozen=True)
class NoLoCoStep(Then):
    """``m <- beta m - alpha D + gamma (A - anchor)``; ``anchor <- anchor + m``, which the weights become."""

    alpha: float = 0.7
    beta: float = 0.5
    gamma: float = 0.6

    def state(self) -> tuple[State, ...]:
        return (State("momentum"),)

    def fold(self, flight: Flight) -> None:
        anchor, momentum = flight.state["anchor"], flight.state["momentum"]
        momentum.mul_(self.beta).sub_(flight.flat, alpha=self.alpha)
        momentum.add_(flight.state["anchors"] - anchor, alpha=self.gamma)
        flight.bucket.write_weights(anchor.add_(momentum))


NOLOCO = Algorithm.of(Exchange(Difference("local"), Every(3), MeetOne(), NoLoCoStep()))


def noloco(steps: int, *, gamma: float = 0.6) -> torch.Tensor:
    """A row for each rank."""
    ranks = Replicas(SIZE, plain_sgd, model_of, loss_of)
    anchors, momenta = ranks.rows, torch.zeros_like(ranks.rows)
    for step in range(steps):
        ranks.step(step)
        if step % 3 == 2:
            pairs = DRAWN_PAIRS.round(SIZE, (step + 1) // 3, (0,) * SIZE).matrix()
            momenta = 0.5 * momenta - 0.7 * pairs @ (anchors - ranks.rows) + gamma * (pairs @ anchors - anchors)
            ranks.rows = anchors = anchors + momenta
    return ranks.rows


def test_noloco_is_what_the_paper_says(thread_ranks):
    found = torch.stack(thread_ranks(SIZE, train, NOLOCO, 12))
    assert torch.allclose(found, noloco(12), rtol=0, atol=1e-12)
    assert not torch.allclose(found, noloco(12, gamma=0.0), rtol=0, atol=1e-6)


@dataclass(frozen=True)
class Weighty(Push):
    """Remembers something else under the name of the mass."""

    def state(self) -> tuple[State, ...]:
        return (State("mass"),)
