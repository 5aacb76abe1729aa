"""Dion and LoCo against their formulas, for all ranks at once in one process; and what must not pass for them."""

from __future__ import annotations

import math

import pytest
import torch

from bagua.algorithms import Algorithm, DionAlgorithm, LoCoAlgorithm
from bagua.compression import Int4, MinMaxUInt8
from bagua.optim import DionOptimizer
from tests.algorithms.stacked import (
    SIZE,
    STEPS,
    CodedSlices,
    Combine,
    Flats,
    Layout,
    assert_only,
    loss_of,
    mean,
    model_of,
    simulate,
    train_alike,
)
from tests.contract.algorithms import AlgorithmContract, exchange_exact_mean, replace_exchanges, spread
from tests.contract.algorithms import train as train_small
from tests.harness import State, assert_close, coded, seeded, sgd, snapshot
from tests.parallel.wrapping import Loop, on_ranks


def nothing(_: int, flats: Flats) -> torch.Tensor:
    """The mutant that does not communicate."""
    return flats[0]


# LoCo.


class LoCo:
    """h = g + e in four bits, slice by slice; e is a running average of what they lose, in eight bits."""

    def __init__(
        self, layout: Layout, averaging: float, reset: int, *, bytes_only: bool = True, early: int = 0
    ) -> None:
        self.exchanges = [CodedSlices(Int4(64), places) for _, places in layout]
        self.averaging, self.reset, self.bytes_only, self.early = averaging, reset, bytes_only, early
        self.e: dict[int, torch.Tensor] = {}
        self.calls = 0

    def __call__(self, index: int, flats: Flats) -> torch.Tensor:
        step, self.calls = self.calls // len(self.exchanges), self.calls + 1
        g = torch.stack(flats) / SIZE
        before = self.e[index] if step and (step + self.early) % self.reset else torch.zeros_like(g)
        result, lost = self.exchanges[index](g + before)
        after = (1 - self.averaging) * before + self.averaging * lost
        self.e[index] = coded(MinMaxUInt8(), after) if self.bytes_only else after
        return result


def test_loco_feeds_an_average_of_what_is_lost_back(thread_ranks):
    algorithm = LoCoAlgorithm(block_numel=64, averaging=0.4, reset_every=20, warmup_steps=0)
    state, layout = train_alike(thread_ranks, algorithm, sgd)
    mutants: dict[str, Combine] = {
        "no average": LoCo(layout, 1.0, 20),
        "never reset": LoCo(layout, 0.4, 1000),
        "no feedback": LoCo(layout, 0.4, 1),
        "reset a step early": LoCo(layout, 0.4, 20, early=1),
        "reset a step late": LoCo(layout, 0.4, 20, early=-1),
        "remembers more": LoCo(layout, 0.4, 20, bytes_only=False),
        "exact": mean,
        "nothing": nothing,
    }
    wrong = {name: simulate(layout, mutant, sgd) for name, mutant in mutants.items()}
    assert_only(state, simulate(layout, LoCo(layout, 0.4, 20), sgd), wrong)


# Dion.

RANK, MU, DION_LR, DECAY, EPS = 2, 0.9, 0.02, 0.1, 1e-8


def dion(parameters):
    return DionOptimizer(parameters, lr=DION_LR, matrix_rank=RANK, momentum=MU, weight_decay=DECAY, adam_lr=0.2)


def simulate_dion(layout: Layout, size: int = SIZE, *, keeps: float = MU, exact: bool = False) -> State:
    """The rule on stacked momenta; bases by a singular value decomposition would have other signs, so by QR."""
    model = model_of()
    weights = dict(model.named_parameters())
    order = [name for _, places in layout for name, _ in places]
    large = [
        name for name in order if weights[name].dim() == 2 and RANK * sum(weights[name].shape) < weights[name].numel()
    ]
    q: State = {}
    for _, places in layout:
        names = [name for name, _ in places if name in large]
        sides = [min(weights[name].shape) for name in names]
        drawn = torch.randn(sum(sides), RANK, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        q.update(zip(names, drawn.split(sides), strict=True))
    momenta = {name: [torch.zeros_like(weights[name]) for _ in range(size)] for name in large}
    adam = torch.optim.AdamW(
        [weights[name] for name in order if name not in large],
        lr=0.2 * DION_LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY,
    )  # fmt: skip
    for step in range(STEPS):
        of_ranks = []
        for rank in range(size):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            of_ranks.append({name: one.grad.clone() for name, one in weights.items()})
        for name, one in weights.items():
            one.grad = torch.stack([grads[name] for grads in of_ranks]).mean(dim=0)
        with torch.no_grad():
            for name in large:
                rows, columns = weights[name].shape
                turn = (lambda x: x) if rows >= columns else torch.t
                own = [turn(m + grads[name]) for m, grads in zip(momenta[name], of_ranks, strict=True)]
                mean_m = torch.stack(own).mean(dim=0)
                p = torch.linalg.qr(mean_m @ q[name]).Q
                r = mean_m.t() @ p
                momenta[name] = [turn(m - (1 - keeps) * p @ r.t()) for m in own]
                q[name] = r / (r.norm(dim=0) + 1e-8)
                step_of = turn(mean_m) if exact else math.sqrt(rows / columns) * turn(p @ q[name].t())
                weights[name].mul_(1 - DION_LR * DECAY).sub_(DION_LR * step_of)
        adam.step()
    return snapshot(model)


def test_dion_steps_along_common_directions(thread_ranks):
    state, layout = train_alike(thread_ranks, DionAlgorithm(matrix_rank=RANK, momentum=MU), dion)
    assert len(layout) > 1
    mutants = ({"keeps": 1.0}, {"keeps": 0.0}, {"exact": True}, {"size": 1})
    assert_only(state, simulate_dion(layout), {str(one): simulate_dion(layout, **one) for one in mutants})


@on_ranks(1)
def test_alone_dion_is_its_optimizer():
    """On one rank the exchange and the optimizer by itself are the same rule."""

    def layer() -> torch.nn.Module:
        with seeded():
            return torch.nn.Linear(8, 4).double()

    algorithm = DionAlgorithm(matrix_rank=RANK, momentum=MU)
    alone = Loop(lambda model, _: model, layer, dion, loss_of).train(10)
    assert_close(alone, Loop("with_bagua", layer, dion, loss_of, algorithm=algorithm).train(10))


# The contract, but for what holds of gradients only: on one rank these step along directions, too.


class QuickDion(DionAlgorithm):
    """Dion with an optimizer of its rank."""

    optimizer_class = staticmethod(lambda parameters: DionOptimizer(parameters, lr=0.001, matrix_rank=2))


@pytest.fixture(params=[QuickDion(matrix_rank=2)], ids=repr)
def algorithm(request) -> Algorithm:
    return request.param


class TestDirections(AlgorithmContract):
    sizes = (2, 3)

    def test_an_exact_mean_in_place_of_the_exchange_gives_something_else(self, algorithm, pool, monkeypatch):
        """Where the exchange makes directions, the steps with mean gradients are no measure."""
        own = pool.run(train_small, algorithm, size=2)
        replace_exchanges(algorithm, monkeypatch, exchange_exact_mean)
        mutated = pool.run(train_small, algorithm, size=2)
        assert max(map(spread, zip(own, mutated, strict=True))) > 1e-4
