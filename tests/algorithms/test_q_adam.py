"""QAdam: each step as the formula says, for all ranks at once in one process; and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable

import pytest
import torch

import bagua.comm
from bagua.algorithms import QAdamAlgorithm
from bagua.comm import solo_group
from bagua.optim import QAdamOptimizer
from bagua.parallel import with_bagua
from tests.harness import State, assert_same_on_all_ranks, mlp, snapshot, train_steps
from tests.parallel.wrapping import Loop, on_ranks

LR, WARMUP, BETA1, BETA2, EPS, DECAY = 0.01, 3, 0.8, 0.9, 0.01, 0.1
STEPS = 10


def qadam(parameters: Iterable[torch.nn.Parameter]) -> QAdamOptimizer:
    return QAdamOptimizer(parameters, lr=LR, warmup_steps=WARMUP, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)


def loop_of(algorithm: QAdamAlgorithm | str = "qadam") -> Loop:
    return Loop("with_bagua", make_optimizer=qadam, algorithm=algorithm, bucket_bytes=10**6)


def train(algorithm: QAdamAlgorithm) -> State:
    return loop_of(algorithm).train(STEPS)


def test_parameter_groups_keep_their_own_betas(thread_ranks):
    """Also in one bucket. A group with ``beta1 = 0`` has the gradient as its momentum."""

    def train_groups() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        model = mlp()
        first, *others = model.parameters()
        optimizer = QAdamOptimizer(
            [{"params": [first], "betas": (0.0, 0.9)}, {"params": others}], lr=LR, warmup_steps=1, eps=EPS
        )
        wrapped = with_bagua(model, [optimizer], QAdamAlgorithm())
        train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(4))
        return optimizer.momentum(first).clone(), first.grad.clone(), optimizer.momentum(others[0]).clone()

    for momentum, gradient, other in thread_ranks(2, train_groups):
        assert torch.allclose(momentum, gradient, atol=1e-6)
        assert other.abs().max() > 0


def test_clipping_and_an_unknown_scaler_change_nothing_but_what_they_should(thread_ranks):
    """The gradient that is left leads to the momentum, so it may be scaled and clipped like any other."""

    def train_scaled(scale: float) -> tuple[State, list[float]]:
        loop, norms = loop_of(), []
        for _ in range(STEPS):
            loop.optimizer.zero_grad()
            (loop.loss() * scale).backward()
            for parameter in loop.model.parameters():
                parameter.grad.div_(scale)
            norms.append(float(torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)))
            loop.optimizer.step()
        return snapshot(loop.model), norms

    plain = thread_ranks(2, train_scaled, 1.0)
    scaled = thread_ranks(2, train_scaled, 1024.0)
    assert_same_on_all_ranks([weights for weights, _ in scaled])
    assert plain[0][1] == pytest.approx(scaled[0][1], rel=0.2)
    assert all(norm > 0.1 for norm in plain[0][1])
    for name, value in plain[0][0].items():
        assert torch.allclose(value, scaled[0][0][name], atol=LR)


@on_ranks(2)
def test_a_gradient_that_is_not_finite_spoils_its_own_step_only():
    """Its block becomes NaN as a whole, with the padding between parameters that lies in it."""
    loop, finite = loop_of(), []
    for step in range(WARMUP + 3):
        loop.optimizer.zero_grad()
        factor = float("inf") if step == WARMUP and loop.rank == 0 else 1.0
        (loop.loss() * factor).backward()
        finite.append(all(parameter.grad.isfinite().all() for parameter in loop.model.parameters()))
        if finite[-1]:
            loop.optimizer.step()
    assert finite == [True] * WARMUP + [False, True, True]


def test_a_declaration_with_an_optimizer_prints_compares_and_pickles_without_it():
    optimizer = qadam(mlp().parameters())
    declaration = QAdamAlgorithm(optimizer, hierarchical=False)
    assert repr(declaration) == "QAdamAlgorithm(hierarchical=False)"
    assert declaration == QAdamAlgorithm(hierarchical=False)
    assert pickle.loads(pickle.dumps(declaration)).q_adam_optimizer is None
    assert copy.copy(declaration) == declaration
    assert declaration.reify(solo_group()).options.q_adam_optimizer is optimizer


def test_the_optimizer_may_be_named(thread_ranks):
    def train_named(named: bool) -> State:
        def wrap(model: torch.nn.Module, optimizer: QAdamOptimizer, **_: object) -> torch.nn.Module:
            return with_bagua(model, [optimizer], QAdamAlgorithm(optimizer if named else None))

        return Loop(wrap, make_optimizer=qadam).train(5)

    assert_same_on_all_ranks([thread_ranks(2, train_named, True)[0], thread_ranks(2, train_named, False)[0]])
