"""``DecentralizedDataParallel`` equals all ranks in one process, on every transport; bad input gets typed errors."""

from __future__ import annotations

import importlib
import importlib.util
import time

import pytest
import torch
from torch import nn

import bagua.comm
from bagua import testing, topology
from bagua.errors import (
    BaguaError,
    CollectiveMismatchError,
    CommunicationError,
    ConfigurationError,
    PeerLostError,
)
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.testing import ProcessRanks
from tests.harness import State, assert_close, assert_same_on_all_ranks, loss_of, mlp, snapshot
from tests.parallel.decentralized_simulation import (
    BUCKET_MB,
    OPTIMIZERS,
    Simulation,
    halving,
    momentum,
    plain_sgd,
    train,
    wrap,
)
from tests.parallel.wrapping import on_ranks
from tests.topologies import DRAWN_PAIRS, ONE_WAY, STAR, UNEVEN_EDGES, Made

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


#: Buckets that are large enough for memory of their own on every transport.
WIDTH = 160


def train_and_average(name: str) -> tuple[list[State], State, list[list[str]]]:
    model = wrap(topology=name)
    states = train(model, range(4))
    with model.global_avg() as average:
        assert 0 < average.distance < 1
        mean = snapshot(model)
    assert all(torch.equal(value, states[-1][name]) for name, value in snapshot(model).items())
    return states, mean, layout_of(model)


@pytest.mark.parametrize("name", ["ring", "hierarchical_ring"])
def test_it_trains_alike_on_every_transport(ranks, name):
    results = ranks(3, train_and_average, name)
    simulation = Simulation(3, results[0][2], matrices_of(name, 3, None if name == "ring" else [0, 0, 0]))
    assert_equals_simulation([states for states, _, _ in results], simulation, 4)
    assert all(torch.equal(mean[key], results[0][1][key]) for _, mean, _ in results for key in mean)


def wide() -> DecentralizedDataParallel:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4))
    return DecentralizedDataParallel(model, plain_sgd, topology="ring", bucket_size_in_mb=0.02)


def lose_a_peer() -> str:
    rank = bagua.comm.get_rank()
    model = wide()
    try:
        train(model, range(2))  # Its last exchanges are still under way when the other rank dies.
        if rank == 1:
            testing.die()
        for step in range(2, 6):
            loss_of(model, rank, step).backward()
    except PeerLostError as error:
        found = type(error).__name__
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all()
    loss = loss_of(model.module, rank, 6)
    assert torch.isfinite(loss), "the weights of this rank can be used and saved"
    assert list(model.state_dict()) == list(model.module.state_dict())
    assert model.optimizer_state_dict()["buckets"]
    with pytest.raises(BaguaError):
        loss_of(model, rank, 7)
    return found


@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(name, marks=getattr(pytest.mark, mark))
        for name, mark in (("thread_pool", "threads"), ("process_pool", "gloo"), ("shm_pool", "shm"))
    ],
)
def test_survivors_keep_their_weights(request, pool):
    outcomes = request.getfixturevalue(pool).outcomes(lose_a_peer, size=2)
    assert outcomes[0].value == "PeerLostError", outcomes[0].trace


def leave_early() -> None:
    rank = bagua.comm.get_rank()
    model = wide()
    for step in range(2):
        if rank == 0 and step == 1:
            time.sleep(1.5)  # The other rank closes meanwhile: more than a second, after which transports give up.
        loss_of(model, rank, step).backward()
    bagua.comm.destroy_process_group()


def test_a_rank_that_is_done_waits_for_the_others(ranks):
    ranks(2, leave_early)


@pytest.mark.hybrid
def test_on_several_hosts():
    results = ProcessRanks(4, backend="hybrid").run(train_on_hosts, hosts=[2, 2])
    simulation = Simulation(4, results[0][1], matrices_of("alternating_exp_ring", 4, [0, 0, 1, 1]))
    assert_equals_simulation([states for states, _ in results], simulation, 4)


def train_on_hosts() -> tuple[list[State], list[list[str]]]:
    assert bagua.comm.get_default_group().global_communicator.backend == "hybrid"
    model = wrap(topology="alternating-exp-ring")
    return train(model, range(4)), layout_of(model)


def train_both(name: str) -> tuple[list[State], list[State]]:
    importlib.import_module("loguru").logger.disable("decent_dp")
    peer = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel
    rank, size = bagua.comm.get_rank(), bagua.comm.get_world_size()
    theirs = mlp()
    torch.set_num_threads(1)
    wrapped = peer(theirs, plain_sgd, topology=name, bucket_size_in_mb=25, _local_world_size=1)
    ours = DecentralizedDataParallel(mlp(), plain_sgd, topology=name, bucket_size_in_mb=BUCKET_MB, _local_world_size=1)
    assert size > 1
    states: tuple[list[State], list[State]] = ([], [])
    for step in range(6):
        for model, seen in ((wrapped, states[0]), (ours, states[1])):
            loss_of(model, rank, step).backward()
            seen.append(snapshot(theirs if model is wrapped else ours))
    return states


@pytest.mark.skipif(importlib.util.find_spec("decent_dp") is None, reason="decent-dp is not installed")
@pytest.mark.parametrize(("name", "size"), [("complete", 2), ("complete", 4), ("ring", 2), ("one-peer-exp", 2)])
def test_the_updates_are_those_of_decent_dp(process_ranks, name, size):
    """Of version 0.2.3, where the order of rounds does not matter: there it is 2, 4, 5, 6 and so on."""
    for theirs, ours in process_ranks(size, train_both, name):
        # It steps for the first time before the second forward.
        for expected, found in zip(theirs[1:], ours[1:], strict=True):
            for key, value in expected.items():
                assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), key
