"""What decent-dp 0.2.3 has beside its constructor, under its names."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.optim import optim_fn_adam
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.topology import FunctionTopology, Topology, create
from tests.harness import State, assert_close, assert_same_on_all_ranks, snapshot
from tests.parallel.decentralized_simulation import Simulation, halving, train, wrap
from tests.parallel.test_decentralized import one_way, uneven_edges

pytestmark = pytest.mark.threads
SIZE = 3
STEPS = 5
FACTOR = 0.3


def trained_with_a_factor(options: dict[str, Any]) -> tuple[list[State], list[list[str]]]:
    model = wrap(**options)
    model.set_adaptive_factor(FACTOR)
    return train(model, range(STEPS)), [list(bucket.names) for bucket in model.bagua_buckets]


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize(
    ("asked_for", "topology"),
    [
        ("complete", create("complete")),
        ("ring", create("alternating_ring")),
        (uneven_edges, FunctionTopology(uneven_edges)),
        (one_way, FunctionTopology(one_way)),
    ],
    ids=["complete", "ring", "uneven_edges", "one_way"],
)
def test_a_factor_goes_a_part_of_the_way(thread_ranks, asked_for: Any, topology: Topology, as_view: bool) -> None:
    results = thread_ranks(SIZE, trained_with_a_factor, {"topology": asked_for, "param_as_bucket_view": as_view})

    def part_of_the_way(number: int) -> torch.Tensor:
        return (1 - FACTOR) * torch.eye(SIZE, dtype=torch.float64) + FACTOR * topology.matrix(SIZE, number, None)

    simulation = Simulation(SIZE, results[0][1], part_of_the_way)
    for step in range(STEPS):
        simulation.step(step)
        for (states, _), expected in zip(results, simulation.states(), strict=True):
            assert_close(states[step], expected)


def test_a_factor_goes_on_after_a_restart(thread_ranks) -> None:
    def run(stops: bool) -> State:
        model = wrap(topology="ring")
        model.set_adaptive_factor(FACTOR)
        train(model, range(3))
        if stops:
            weights, optimizers, communication = (
                model.state_dict(),
                model.optimizer_state_dict(),
                model.communication_state_dict(),
            )
            model = wrap(topology="ring")
            model.load_state_dict(weights)
            model.load_optimizer_state_dict(optimizers)
            model.load_communication_state_dict(communication)
        return train(model, [3, 4])[-1]

    for stopped, plain in thread_ranks(SIZE, lambda: (run(True), run(False))):
        assert all(torch.equal(stopped[name], plain[name]) for name in plain)


def test_the_average_is_reverted_once_and_can_stay(thread_ranks) -> None:
    def run() -> tuple[State, State]:
        model = wrap(topology="ring")
        with pytest.raises(ConfigurationError, match="will_revert=True"):
            model.revert_global_avg()
        own = train(model, range(2))[-1]
        distance = model.global_avg(return_d2c=True)
        assert isinstance(distance, float)
        assert distance > 0
        model.revert_global_avg()
        reverted = snapshot(model)
        assert all(torch.equal(reverted[name], own[name]) for name in own)
        with pytest.raises(ConfigurationError, match="will_revert=True"):
            model.revert_global_avg()
        going_on = train(model, [2])[-1]
        with model.global_avg(will_revert=False) as average:
            assert average.distance > 0
        with pytest.raises(ConfigurationError, match="will_revert=True"):
            model.revert_global_avg()
        model.global_avg()
        train(model, [3])
        with pytest.raises(ConfigurationError, match="trained on"):
            model.revert_global_avg()
        return going_on, train(wrap(topology="ring"), range(3))[-1]

    for going_on, undisturbed in thread_ranks(SIZE, run):
        assert all(torch.equal(going_on[name], undisturbed[name]) for name in undisturbed)


def test_the_mean_stays_without_will_revert(thread_ranks) -> None:
    def run() -> State:
        model = wrap(topology="ring")
        train(model, range(2))
        model.global_avg(will_revert=False)
        return snapshot(model)

    assert_same_on_all_ranks(thread_ranks(SIZE, run))


def test_the_learning_rate_is_that_of_the_schedule(thread_ranks) -> None:
    def run() -> list[float]:
        model = wrap(lr_scheduler_fn=halving)
        rates = [model.get_lr()]
        train(model, [0])
        rates.append(model.get_lr())
        plain = wrap()
        train(plain, [0])
        return [*rates, plain.get_lr()]

    assert thread_ranks(2, run)[0] == pytest.approx([0.0, 0.08, 0.1])


@pytest.mark.parametrize(("factor", "error"), [(1.5, ConfigurationError), ("half", InvalidTypeError)])
def test_factors_that_mean_nothing(factor: Any, error: type[Exception]) -> None:
    model = DecentralizedDataParallel(
        nn.Linear(2, 2), functools.partial(optim_fn_adam, lr=0.1), process_group=bagua.comm.solo_group()
    )
    with pytest.raises(error, match="from 0 to 1"):
        model.set_adaptive_factor(factor)


def test_the_loop_of_its_own_test_runs(thread_ranks) -> None:
    """Batch normalization, Adam, a factor for the last epochs, and an evaluation on the mean after each."""

    def run() -> tuple[list[float], State]:
        rank, size = bagua.comm.get_rank(), bagua.comm.get_world_size()
        random = torch.Generator().manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        optimizers = functools.partial(optim_fn_adam, beta1=0.974, lr=1e-2 * size)
        model = DecentralizedDataParallel(module, optimizers, topology="ring", sync_buffer_in_global_avg=True)
        labels = torch.arange(96) // size % 4
        images = torch.randn(4, 16, generator=random)[labels] + 0.3 * torch.randn(96, 16, generator=random)
        images = images.view(96, 4, 4)
        loss_of = nn.CrossEntropyLoss(label_smoothing=0.025)
        losses = []
        for epoch in range(6):
            model.train()
            if epoch >= 4:
                model.set_adaptive_factor(0.1)
            for chosen in torch.arange(rank, 96, size).split(16):
                loss_of(model(images[chosen]), labels[chosen]).backward()
            model.global_avg(will_revert=True)
            averaged = snapshot(module)
            with torch.no_grad():
                model.eval()
                losses.append(float(loss_of(model(images), labels)))
            model.revert_global_avg()
        return losses, averaged

    results = thread_ranks(2, run)
    assert_same_on_all_ranks([averaged for _, averaged in results])
    losses = results[0][0]
    assert losses[-1] < 0.5 * losses[0]
