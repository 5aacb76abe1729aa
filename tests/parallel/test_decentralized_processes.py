"""``DecentralizedDataParallel`` on processes: every transport, hosts, and a rank that is killed."""

from __future__ import annotations

import importlib
import importlib.util
import time

import pytest
import torch

import bagua.comm
from bagua import testing
from bagua.errors import BaguaError, PeerLostError
from bagua.parallel.decentralized import DecentralizedDataParallel
from bagua.testing import ProcessRanks
from tests.harness import State, loss_of, mlp, snapshot
from tests.parallel.decentralized_simulation import BUCKET_MB, Simulation, plain_sgd, train, wrap
from tests.parallel.test_decentralized import assert_equals_simulation, layout_of, matrices_of

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
