"""Training by gossip equals, step by step, the textbook's formulas with all ranks in one process."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import (
    Algorithm,
    DecentralizedAlgorithm,
    DifferenceMix,
    Every,
    Exchange,
    Flight,
    LowPrecisionDecentralizedAlgorithm,
    Mix,
    Replace,
    Weights,
)
from bagua.compression import Identity, MinMaxUInt8
from bagua.errors import ConfigurationError
from bagua.parallel import bagua_init, with_bagua
from bagua.topology import Hierarchical, Ring
from tests.algorithms.replicas import Replicas
from tests.harness import State, adam, batch, mlp, seeded, sgd, snapshot, train_steps
from tests.parallel.wrapping import Loop, on_ranks
from tests.topologies import ONE_WAY, STAR, Made, graph

STEPS = 6
Matrix = torch.Tensor


def model() -> nn.Module:
    """In double precision, so that what is rounded to bytes is rounded alike by everyone."""
    with seeded():
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def loss(network: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(network(inputs.double()), targets.double())


def train(algorithm: Algorithm, make_optimizer=sgd, **options) -> State:
    def wrap(network: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return bagua_init(network, optimizer, algorithm, bucket_bytes=100, **options)[0]

    loop = Loop(wrap, model, make_optimizer, loss)
    loop.train(STEPS)
    loop.wrapped.bagua_state_dict()
    return snapshot(loop.model)


def simulation_of(size: int, make_optimizer=sgd) -> Replicas:
    return Replicas(size, make_optimizer, model, loss)


def simulated(matrices: list[Matrix], make_optimizer=sgd) -> Replicas:
    """``x_i <- sum_j W_ij x_j - lr u(g_i(x_i))``, with one matrix for each exchange."""
    simulation = simulation_of(len(matrices[0]), make_optimizer)
    for step in range(STEPS):
        simulation.backward(step)
        simulation.rows = matrices[step % len(matrices)] @ simulation.rows
        simulation.update()
    return simulation


def mean(size: int) -> Matrix:
    return torch.full((size, size), 1 / size, dtype=torch.float64)


def paired(size: int, pairs: list[tuple[int, int]]) -> Matrix:
    matrix = torch.eye(size, dtype=torch.float64)
    for first, second in pairs:
        matrix[[first, first, second, second], [first, second, first, second]] = 0.5
    return matrix


def thirds(size: int) -> Matrix:
    """A ring where each takes a third of both sides; two ranks take half of each other."""
    if size < 3:
        return mean(size)
    ones = torch.eye(size, dtype=torch.float64)
    return (ones + ones.roll(1, dims=0) + ones.roll(-1, dims=0)) / 3


def test_each_algorithm_is_one_exchange_of_weights_with_neighbours():
    """test_pairs.py trains with such exchanges of any topology and codec, and says what has to come of it."""
    (mixed,) = DecentralizedAlgorithm(False, "ring", 3).exchanges()
    assert mixed == Exchange(Weights(), Every(3, 1), Mix("ring", False), Replace(), at="backward begins")
    (differences,) = LowPrecisionDecentralizedAlgorithm(True, 2, topology="torus", codec=Identity()).exchanges()
    assert differences == Exchange(Weights(), Every(2, 1), DifferenceMix("torus", Identity(), True), Replace())
    assert DecentralizedAlgorithm() == DecentralizedAlgorithm(True, "all", 1)
    assert LowPrecisionDecentralizedAlgorithm() == LowPrecisionDecentralizedAlgorithm(
        True, 1, topology="ring", codec=MinMaxUInt8()
    )


def test_the_optimizer_is_the_users(thread_ranks):
    results = thread_ranks(2, functools.partial(train, fusion=False), DecentralizedAlgorithm(), adam)
    simulated([mean(2)], make_optimizer=adam).assert_equals(results)


def test_a_topology_of_ones_own(thread_ranks):
    matrices = [
        torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.6, 0.3], [0.2, 0.1, 0.7]], dtype=torch.float64),
        paired(3, [(0, 2)]),
    ]
    topology = Made(lambda size, step, nodes: matrices[(step - 1) % 2])
    results = thread_ranks(3, train, DecentralizedAlgorithm(peer_selection_mode=topology))
    simulated(matrices).assert_equals(results)


@pytest.mark.parametrize(
    ("hosts", "mode", "rows"),
    [
        # Hosts of sizes s and t that meet end with the mean over their ranks.
        ([2, 1], "shift_one", [[1 / 3] * 3] * 3),
        ([1, 3], "all", [[1 / 4] * 4] * 4),
        # On a star of hosts, host i takes u min(s_i, s_j) / s_i of the mean of host j.
        (
            [2, 1, 1],
            STAR,
            [
                [1 / 3, 1 / 3, 1 / 6, 1 / 6],
                [1 / 3, 1 / 3, 1 / 6, 1 / 6],
                [1 / 6, 1 / 6, 2 / 3, 0],
                [1 / 6, 1 / 6, 0, 2 / 3],
            ],
        ),
    ],
    ids=["pair", "all", "star"],
)
def test_on_uneven_hosts_the_mean_over_ranks_is_kept(thread_ranks, hosts, mode, rows):
    algorithm = DecentralizedAlgorithm(peer_selection_mode=mode)
    results = thread_ranks(sum(hosts), train, algorithm, hosts=hosts)
    simulated([torch.tensor(rows, dtype=torch.float64)]).assert_equals(results)


def test_the_flat_form_does_not_look_at_hosts(thread_ranks):
    algorithm = DecentralizedAlgorithm(hierarchical=False, peer_selection_mode="ring")
    simulated([thirds(4)]).assert_equals(thread_ranks(4, train, algorithm, hosts=[1, 3]))


# In low precision.


@pytest.mark.parametrize(
    ("hosts", "between"),
    [([2, 1], [[2 / 3, 1 / 3], [2 / 3, 1 / 3]]), ([1, 3], [[2 / 3, 1 / 3], [1 / 9, 8 / 9]])],
    ids=str,
)
def test_differences_between_uneven_hosts(thread_ranks, hosts, between):
    """Two hosts: with ``complete`` they take the mean over ranks, else ``u min(s, t) / s`` of the other's mean."""
    whole = hosts == [2, 1]
    topology = "complete" if whole else graph([[2 / 3, 1 / 3], [1 / 3, 2 / 3]], symmetric=True)
    algorithm = LowPrecisionDecentralizedAlgorithm(codec=Identity(), topology=topology)
    results = thread_ranks(sum(hosts), train, algorithm, hosts=hosts)
    means = torch.block_diag(*(mean(size) for size in hosts))
    spread = torch.zeros(sum(hosts), sum(hosts), dtype=torch.float64)
    nodes = [host for host, size in enumerate(hosts) for _ in range(size)]
    for i, host in enumerate(nodes):
        for j, other in enumerate(nodes):
            spread[i, j] = between[host][other] / hosts[other]
    simulation = simulation_of(sum(hosts))
    replicas: Matrix | None = None
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

    results = thread_ranks(3, train_in_both_forms, hosts=[2, 1])
    for states in zip(*results, strict=True):
        for state in states:
            assert all(torch.allclose(value, states[0][name], atol=1e-4) for name, value in state.items())


# What goes wrong.


@pytest.mark.parametrize("algorithm", [DecentralizedAlgorithm(peer_selection_mode="ring"), "low_precision"], ids=str)
def test_spoilt_weights_of_one_rank_do_not_spread(thread_ranks, algorithm):
    algorithm = LowPrecisionDecentralizedAlgorithm() if algorithm == "low_precision" else algorithm
    results = thread_ranks(3, _train_with_spoilt_weights, algorithm)
    for rank, state in enumerate(results):
        assert all(torch.isfinite(value).all() for value in state.values()), rank


def _train_with_spoilt_weights(algorithm: Algorithm) -> State:
    loop = Loop("with_bagua", algorithm=algorithm)
    for step in range(STEPS):
        inputs, targets = batch(loop.rank, step)
        sound = copy.deepcopy(loop.model.state_dict())
        loop.optimizer.zero_grad()
        loss = nn.functional.mse_loss(loop.wrapped(inputs), targets)
        if (loop.rank, step) == (1, 3):
            with torch.no_grad():
                loop.model[0].weight.data.fill_(float("nan"))
        loss.backward()
        loop.optimizer.step()
        if (loop.rank, step) == (1, 3):
            loop.model.load_state_dict(sound)
            loop.optimizer.state.clear()
    return snapshot(loop.model)


def test_exchanges_of_weights_start_with_the_first_gradient(thread_ranks, monkeypatch):
    """Not when their own gradients are there: they are not what is sent."""
    events = threading.local()
    fill = Weights.fill

    def noted(self: Weights, flight: Flight) -> None:
        events.seen.append("fill")
        fill(self, flight)

    def step() -> tuple[list[str], int]:
        rank, network, events.seen = bagua.comm.get_rank(), mlp(), []
        wrapped = with_bagua(network, [sgd(network.parameters())], DecentralizedAlgorithm(), bucket_bytes=100)
        nn.functional.mse_loss(wrapped(batch(rank, 0)[0]), batch(rank, 0)[1]).backward()
        events.seen.clear()
        seen = events.seen
        network[0].weight.register_hook(lambda _: seen.append("last gradient"))
        nn.functional.mse_loss(wrapped(batch(rank, 1)[0]), batch(rank, 1)[1]).backward()
        return seen, len(wrapped.bagua_buckets)

    monkeypatch.setattr(Weights, "fill", noted)
    for seen, count in thread_ranks(2, step):
        assert count > 1
        assert seen == [*(["fill"] * count), "last gradient"]


# What is refused.


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        (LowPrecisionDecentralizedAlgorithm(topology=ONE_WAY), "same weight"),
        (DecentralizedAlgorithm(peer_selection_mode=graph([[0.5, 0.5], [0.5, 0.5]])), "number of ranks"),
        (DecentralizedAlgorithm(peer_selection_mode=graph(torch.ones(5, 5))), "sum to 1"),
    ],
    ids=["one direction", "size", "sums"],
)
@on_ranks(5)
def test_topologies_that_do_not_fit_are_refused_when_the_model_is_wrapped(algorithm, words):
    network = mlp()
    with pytest.raises(ConfigurationError, match=words):
        with_bagua(network, [sgd(network.parameters())], algorithm)


@on_ranks(2)
def test_a_parameter_that_no_optimizer_steps_is_named():
    network = mlp()
    with pytest.raises(ConfigurationError, match=r"2\.bias"):
        with_bagua(network, [sgd([*network[0].parameters(), network[2].weight])], "low_precision_decentralized")


# As a value.


def test_a_topology_as_an_option_prints_and_is_compared():
    algorithm = DecentralizedAlgorithm(peer_selection_mode=Hierarchical(Ring()))
    assert repr(algorithm) == (
        "DecentralizedAlgorithm(hierarchical=True, peer_selection_mode=Hierarchical(between_hosts=Ring()), "
        "communication_interval=1)"
    )
    assert algorithm == DecentralizedAlgorithm(peer_selection_mode=Hierarchical(Ring()))
