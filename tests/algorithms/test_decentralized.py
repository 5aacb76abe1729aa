"""Training by gossip equals, step by step, the textbook's formulas with all ranks in one process."""

import copy
import functools
import threading

import pytest
import torch

import bagua.comm
from bagua import algorithms
from bagua.algorithms import DecentralizedAlgorithm, Every, Exchange, LowPrecisionDecentralizedAlgorithm, Weights
from bagua.compression import Identity, MinMaxUInt8
from bagua.parallel import with_bagua
from tests import harness
from tests.algorithms.stacked import Replicas, loss_of, model_of
from tests.harness import State, adam, mlp, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, on_ranks
from tests.topologies import STAR, Made, graph

STEPS = 6


def train(algorithm: algorithms.Algorithm, make_optimizer=sgd, *, fusion: bool = True) -> State:
    options = {"bucket_bytes": 1500, "fusion": fusion}
    loop = Loop("bagua_init", model_of, make_optimizer, loss_of, distributed_algorithm=algorithm, **options)
    loop.train(STEPS)
    loop.wrapped.bagua_state_dict()
    return snapshot(loop.model)


#: Weights of three ranks, not alike in both directions, and a meeting of two of them.
LEANING = [[0.7, 0.3, 0.0], [0.1, 0.6, 0.3], [0.2, 0.1, 0.7]]
MEETING = [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]
#: On a star of hosts, host i takes u min(s_i, s_j) / s_i of the mean of host j.
THIRD, SIXTH = 1 / 3, 1 / 6
ON_A_STAR = [[THIRD, THIRD, SIXTH, SIXTH]] * 2 + [[SIXTH, SIXTH, 2 / 3, 0], [SIXTH, SIXTH, 0, 2 / 3]]


def test_each_algorithm_is_one_exchange_of_weights_with_neighbours():
    """test_pairs.py trains with such exchanges of any topology and codec, and says what has to come of it."""
    (mixed,) = DecentralizedAlgorithm(False, "ring", 3).exchanges()
    how, then = algorithms.Mix("ring", False), algorithms.Replace()
    assert mixed == Exchange(Weights(), Every(3, 1), how, then, at="backward begins")
    (differences,) = LowPrecisionDecentralizedAlgorithm(True, 2, topology="torus", codec=Identity()).exchanges()
    assert differences == Exchange(Weights(), Every(2, 1), algorithms.DifferenceMix("torus", Identity(), True), then)
    assert DecentralizedAlgorithm() == DecentralizedAlgorithm(True, "all", 1)
    by_default = LowPrecisionDecentralizedAlgorithm(True, 1, topology="ring", codec=MinMaxUInt8())
    assert LowPrecisionDecentralizedAlgorithm() == by_default


@pytest.mark.parametrize(
    ("hosts", "mode", "flat", "rounds"),
    [
        # Hosts of sizes s and t that meet end with the mean over their ranks.
        ([2, 1], "shift_one", False, [[[THIRD] * 3] * 3]),
        ([2, 1, 1], STAR, False, [ON_A_STAR]),
        ([1, 2], graph(LEANING), True, [LEANING]),
        ([3], Made(lambda size, step, nodes: (LEANING, MEETING)[(step - 1) % 2]), False, [LEANING, MEETING]),
    ],
    ids=["pair", "star", "flat", "in turns"],
)
def test_each_step_is_a_product_with_the_matrix_of_its_round(thread_ranks, hosts, mode, flat, rounds):
    """``x_i <- sum_j W_ij x_j - lr u(g_i(x_i))``; the optimizer is the user's."""
    algorithm = DecentralizedAlgorithm(hierarchical=not flat, peer_selection_mode=mode)
    results = thread_ranks(sum(hosts), functools.partial(train, fusion=not flat), algorithm, adam, hosts=hosts)
    simulation = Replicas(sum(hosts), adam, model_of, loss_of)
    for step in range(STEPS):
        simulation.backward(step)
        simulation.rows = torch.tensor(rounds[step % len(rounds)], dtype=torch.float64) @ simulation.rows
        simulation.update()
    simulation.assert_equals(results)


def test_differences_between_uneven_hosts(thread_ranks):
    """Two hosts of sizes s and t: each takes ``u min(s, t) / s`` of the other's mean."""
    hosts, nodes = [1, 3], [0, 1, 1, 1]
    topology = graph([[2 / 3, 1 / 3], [1 / 3, 2 / 3]], symmetric=True)
    algorithm = LowPrecisionDecentralizedAlgorithm(codec=Identity(), topology=topology)
    results = thread_ranks(sum(hosts), train, algorithm, hosts=hosts)
    means = torch.block_diag(*(torch.full((size, size), 1 / size, dtype=torch.float64) for size in hosts))
    between = torch.tensor([[2 / 3, 1 / 3], [1 / 9, 8 / 9]], dtype=torch.float64)
    spread = between[nodes][:, nodes] / torch.tensor(hosts)[nodes]
    simulation = Replicas(sum(hosts), sgd, model_of, loss_of)
    replicas: torch.Tensor | None = None
    for step in range(STEPS):
        simulation.backward(step)
        simulation.update()
        on_hosts = means @ simulation.rows
        replicas = on_hosts if replicas is None else spread @ replicas + on_hosts - replicas
        simulation.rows = replicas
    simulation.assert_equals(results)


def test_what_is_known_of_neighbours_is_learned_anew_when_they_change(thread_ranks):
    """Leaders of hosts know others than ranks do, and a rank that does not lead knows nobody meanwhile."""

    def train_in_both_forms() -> list[State]:
        model, seen = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = with_bagua(model, [optimizer], LowPrecisionDecentralizedAlgorithm(hierarchical=False))
        for number, hierarchical in enumerate((False, True, False)):
            wrapped._bagua_engine.reducer.formation.reset(hierarchical_reduce=hierarchical)
            optimizer.param_groups[0]["lr"] = 0.1
            train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(2 * number, 2 * number + 2))
            optimizer.param_groups[0]["lr"] = 0.0
            train_steps(wrapped, optimizer, bagua.comm.get_rank(), range(12))
            seen.append(snapshot(model))
        return seen

    for states in zip(*thread_ranks(3, train_in_both_forms, hosts=[2, 1]), strict=True):
        torch.testing.assert_close(states[1:], states[:1] * 2, rtol=1e-5, atol=1e-4)


@on_ranks(3)
def test_spoilt_weights_of_one_rank_do_not_spread():
    loop = Loop("with_bagua", algorithm=DecentralizedAlgorithm(peer_selection_mode="ring"))
    for step in range(STEPS):
        sound = copy.deepcopy(loop.model.state_dict())
        loop.optimizer.zero_grad()
        loss = harness.loss_of(loop.wrapped, loop.rank, step)
        if (loop.rank, step) == (1, 3):
            with torch.no_grad():
                loop.model[0].weight.data.fill_(float("nan"))
        loss.backward()
        loop.optimizer.step()
        if (loop.rank, step) == (1, 3):
            loop.model.load_state_dict(sound)
            loop.optimizer.state.clear()
    assert all(torch.isfinite(value).all() for value in snapshot(loop.model).values())


def test_exchanges_of_weights_start_with_the_first_gradient(thread_ranks, monkeypatch):
    """Not when their own gradients are there: they are not what is sent."""
    events = threading.local()
    fill = Weights.fill

    def noted(self: Weights, flight: algorithms.Flight) -> None:
        events.seen.append("fill")
        fill(self, flight)

    def step() -> tuple[list[str], int]:
        rank, network, events.seen = bagua.comm.get_rank(), mlp(), []
        wrapped = with_bagua(network, [sgd(network.parameters())], DecentralizedAlgorithm(), bucket_bytes=100)
        harness.loss_of(wrapped, rank, 0).backward()
        events.seen = seen = []
        network[0].weight.register_hook(lambda _: seen.append("last gradient"))
        harness.loss_of(wrapped, rank, 1).backward()
        return seen, len(wrapped.bagua_buckets)

    monkeypatch.setattr(Weights, "fill", noted)
    for seen, count in thread_ranks(2, step):
        assert count > 1
        assert seen == [*(["fill"] * count), "last gradient"]
