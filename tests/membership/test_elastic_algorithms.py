"""Algorithms that exchange gradients in each step, while islands go and come between steps; or why they are refused."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from bagua.algorithms import (
    DionAlgorithm,
    LocalUpdates,
    LoCoAlgorithm,
    PowerSGDAlgorithm,
    SignSGDAlgorithm,
    TopKAlgorithm,
    registry,
)
from bagua.errors import ConfigurationError
from bagua.optim import DionOptimizer
from bagua.parallel import with_bagua
from tests.algorithms.toys import QuickOneBitAdam, QuickOneBitLamb, QuickQAdam
from tests.contract.algorithms import optimizer_maker, spread
from tests.harness import loss_of, mean_gradients, mlp, snapshot
from tests.membership.training import joined, new_store, run

pytestmark = pytest.mark.threads

#: Warm-ups end before islands go and come.
QUICK = {
    "qadam": QuickQAdam,
    "one_bit_adam": QuickOneBitAdam,
    "one_bit_lamb": QuickOneBitLamb,
    "loco": partial(LoCoAlgorithm, warmup_steps=0),
    "sign_sgd": partial(SignSGDAlgorithm, warmup_steps=0),
    "top_k": partial(TopKAlgorithm, warmup_steps=1, density_steps=2),
    "power_sgd": partial(PowerSGDAlgorithm, warmup_steps=1),
    "dion": partial(DionAlgorithm, matrix_rank=2),
}
REFUSED = {"scatter_gather_allreduce": "only sums and means"}
OF_GRADIENTS = [
    name
    for name in registry
    if not issubclass(registry.get(name), LocalUpdates)
    and any("gradients" in one.needs for one in registry.get(name)().every_exchange())
]
GOES_AFTER, COMES_AFTER, STEPS = 3, 5, 8


def optimizer_of(algorithm, model):
    if isinstance(algorithm, DionAlgorithm):
        return DionOptimizer(model.parameters(), lr=0.01, matrix_rank=algorithm.matrix_rank)
    return optimizer_maker(algorithm)(model.parameters())


def train_elastic(algorithm):
    """The weights of each island after each step, and who contributed to it: one goes, and comes again."""
    store, lock, numbers = new_store(), threading.Lock(), iter(range(3))

    def stay(islands, model, optimizer, first, last):
        found = {}
        for step in range(first, last + 1):
            if step == COMES_AFTER and islands.seat < 3 and last == STEPS:
                while not any(seat > 2 and one.waiting for seat, one in islands._state.roster.records.items()):
                    threading.Event().wait(0.002)
            optimizer.zero_grad()
            loss_of(model, islands.seat, step).backward()
            optimizer.step()
            found[step] = (snapshot(model), islands.members().contributed)
        return found

    def train(islands, last):
        model = mlp(islands.seat)
        optimizer = optimizer_of(algorithm, model)
        with_bagua(model, [optimizer], algorithm, between=islands, elastic=True)
        return stay(islands, model, optimizer, model.bagua_step + 1, last)

    def island():
        with lock:
            goes = next(numbers) == 2
        rows = []
        with joined(store, 3) as islands:
            rows.append(train(islands, GOES_AFTER if goes else STEPS))
        if goes:
            with joined(store, 3) as islands:
                rows.append(train(islands, STEPS))
        return rows

    return [row for rows in run(3, island) for row in (rows if isinstance(rows, list) else [rows])]


def trained_whole(algorithm, crowds):
    """One process with the batches of those who contributed to each step."""
    model = mlp(0)
    optimizer = optimizer_of(algorithm, model)
    for step, seats in enumerate(crowds, start=1):

        def losses(model, place, step=step, seats=seats):
            return loss_of(model, seats[place], step)

        mean_gradients(model, len(seats), losses)
        optimizer.step()
    return snapshot(model)


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_islands_go_and_come_between_steps(name):
    """All hold the same bit by bit after each step, and what one process would, as near as the algorithm promises."""
    algorithm = QUICK.get(name, registry.get(name))()
    if name in REFUSED:
        with joined(new_store(), 1) as islands, pytest.raises(ConfigurationError, match=REFUSED[name]):
            with_bagua(mlp(), [], algorithm, between=islands, elastic=True)
        return
    rows = train_elastic(algorithm)
    by_step = {}
    for row in rows:
        for step, (weights, contributed) in row.items():
            other = by_step.setdefault(step, (weights, contributed))
            assert contributed == other[1]
            assert all(torch.equal(one, other[0][key]) for key, one in weights.items()), step
    crowds = [by_step[step][1] for step in sorted(by_step)]
    assert sorted({len(crowd) for crowd in crowds}) == [2, 3]
    assert sorted(set().union(*crowds)) == [0, 1, 2, 3]
    distance = spread([by_step[STEPS][0], trained_whole(algorithm, crowds)])
    assert distance < (1e-6 if algorithm.promise == "exact" else 0.1)
    if name != "dion":  # Its optimizer steps along other directions when nothing is exchanged.
        assert algorithm.promise == "exact" or distance > 1e-6
