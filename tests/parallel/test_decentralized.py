"""``DecentralizedDataParallel`` equals a simulation of all ranks in one process, step by step."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua import topology
from tests.harness import assert_close, assert_same_on_all_ranks, loss_of, snapshot
from tests.parallel.decentralized_simulation import OPTIMIZERS, Simulation, halving, momentum, train, wrap
from tests.topologies import DRAWN_PAIRS, ONE_WAY, STAR, UNEVEN_EDGES

STEPS = 7


def matrices_of(which: str | topology.Topology, size: int, nodes=None):
    one = topology.create({"ring": "alternating_ring"}.get(which, which))
    return lambda number: one.matrix(size, number, nodes)


def assert_equals_simulation(states_of_ranks, simulation: Simulation, steps: int = STEPS) -> None:
    for step in range(steps):
        simulation.step(step)
        for states, expected in zip(states_of_ranks, simulation.states(), strict=True):
            assert_close(states[step], expected)


def layout_of(model) -> list[list[str]]:
    return [list(bucket.names) for bucket in model.bagua_buckets]


def trained(options):
    model = wrap(**options)
    return train(model, range(STEPS)), layout_of(model)


@pytest.mark.parametrize(
    ("name", "size", "as_view"),
    [
        *((name, size, True) for name in ("complete", "ring", "one-peer-exp") for size in range(1, 7)),
        *((name, 3, False) for name in ("complete", "ring")),
    ],
)
def test_each_step_is_that_of_the_simulation(thread_ranks, name, size, as_view):
    results = thread_ranks(size, trained, {"topology": name, "param_as_bucket_view": as_view})
    layout = results[0][1]
    assert len(layout) > 1, "several buckets"
    assert_equals_simulation([states for states, _ in results], Simulation(size, layout, matrices_of(name, size)))


@pytest.mark.parametrize("optimizer", ["adamw", "accum_adamw"])
@pytest.mark.parametrize("name", ["complete", "one-peer-exp"])
def test_each_optimizer_is_stepped_in_each_bucket(thread_ranks, name, optimizer):
    optim_fn = OPTIMIZERS[optimizer]
    options = {"topology": name, "optim_fn": optim_fn, "lr_scheduler_fn": halving}
    results = thread_ranks(3, trained, options)
    simulation = Simulation(3, results[0][1], matrices_of(name, 3), optim_fn, halving)
    assert_equals_simulation([states for states, _ in results], simulation)


@pytest.mark.parametrize(
    ("hosts", "options"), [([2, 2], {}), ([1, 3], {}), ([2, 2, 2], {}), ([4], {"_local_world_size": 2})], ids=str
)
def test_hosts_alternate(thread_ranks, hosts, options):
    """The size of hosts can be given."""
    size, counts = sum(hosts), [2, 2] if options else hosts
    nodes = [node for node, count in enumerate(counts) for _ in range(count)]
    results = thread_ranks(size, trained, {"topology": "alternating-exp-ring", **options}, hosts=hosts)
    matrices = matrices_of("alternating_exp_ring", size, nodes)
    assert_equals_simulation([states for states, _ in results], Simulation(size, results[0][1], matrices))


@pytest.mark.parametrize(
    "which",
    [
        topology.Ring(),
        STAR,
        DRAWN_PAIRS,
        topology.Hierarchical(topology.Ring()),
        UNEVEN_EDGES,
        ONE_WAY,
    ],
    ids=str,
)
@pytest.mark.parametrize("as_view", [True, False])
def test_graphs_and_matchings(thread_ranks, which, as_view):
    results = thread_ranks(4, trained, {"topology": which, "param_as_bucket_view": as_view}, hosts=[1, 3])
    simulation = Simulation(4, results[0][1], lambda number: which.matrix(4, number, [0, 1, 1, 1]))
    assert_equals_simulation([states for states, _ in results], simulation)


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping(thread_ranks, scaled):
    def train_clipped():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if scaled else None
        model = wrap(topology="ring", scaler=scaler, grad_clip_norm=0.3)
        return train(model, range(STEPS), scaler), layout_of(model)

    results = thread_ranks(2, train_clipped)
    simulation = Simulation(2, results[0][1], matrices_of("ring", 2), clip=0.3, scaled=scaled)
    assert_equals_simulation([states for states, _ in results], simulation)


def test_an_overflow_on_one_rank_skips_its_update_and_nothing_else(thread_ranks):
    def overflow(rank, step, loss):
        return loss * float("inf") if (rank, step) == (1, 3) else loss

    def train_with_overflow():
        rank = bagua.comm.get_rank()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        model = wrap(topology="complete", scaler=scaler)
        states = []
        for step in range(STEPS):
            scaler.scale(overflow(rank, step, loss_of(model, rank, step))).backward()
            states.append(snapshot(model))
        return states, layout_of(model), scaler.get_scale()

    results = thread_ranks(3, train_with_overflow)
    simulation = Simulation(3, results[0][1], matrices_of("complete", 3), scaled=True)
    for step in range(STEPS):
        simulation.step(step, lambda rank, loss, step=step: overflow(rank, step, loss))
        for (states, _, _), expected in zip(results, simulation.states(), strict=True):
            assert_close(states[step], expected)
    assert [result[2] for result in results] == [scaler.get_scale() for scaler in simulation.scalers]
    assert results[0][2] != results[1][2], "each rank has a scale of its own"


def test_ranks_agree_once_gradients_vanish(thread_ranks):
    def rest():
        model = wrap(topology="one-peer-exp", optim_fn=momentum)
        train(model, range(3))
        for optimizer in model.bagua_optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
        return train(model, range(3, 8))[-1]

    states = thread_ranks(4, rest)
    assert_same_on_all_ranks([{name: value.float().round(decimals=5) for name, value in s.items()} for s in states])
