"""Asynchronous averaging between processes: on both transports, with a kill, and with scripts that just end."""

from __future__ import annotations

import socket
import time

import pytest
import torch

import bagua.comm
from bagua import testing
from bagua.algorithms import AsyncModelAverageAlgorithm
from bagua.comm.store.serving import serve_store
from bagua.errors import PeerLostError
from bagua.parallel import with_bagua
from tests.harness import State, assert_same_on_all_ranks, mlp, snapshot, train_steps
from tests.parallel.scripts import start_scripts

pytestmark = pytest.mark.timeout(600)

#: Much more than a busy machine delays a thread.
PEER_TIMEOUT_S = 8.0
#: Between two steps of ranks that train until something happens: it takes them little of the processor.
PACE_S = 0.01


def _build(mode: str = "all"):
    model = mlp(bagua.comm.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    algorithm = AsyncModelAverageAlgorithm(mode, 1, peer_timeout_s=PEER_TIMEOUT_S)
    return with_bagua(model, [optimizer], algorithm, bucket_bytes=1000), optimizer


def _train_and_abort(mode: str) -> State:
    rank = bagua.comm.get_rank()
    model, optimizer = _build(mode)
    while model.bagua_algorithm.status().rounds < 3:
        train_steps(model, optimizer, rank, [0])
        time.sleep(PACE_S)
    assert model.bagua_algorithm.abort(model)
    return snapshot(model)


@pytest.mark.gloo
def test_models_are_equal_after_abort_on_gloo(process_ranks):
    assert_same_on_all_ranks(process_ranks(3, _train_and_abort, "shift_one"))


@pytest.mark.shm
def test_models_are_equal_after_abort_in_shared_memory(shm_pool):
    assert_same_on_all_ranks(shm_pool.run(_train_and_abort, "all", size=2))


def _build_after_warm_up():
    model = mlp(bagua.comm.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return with_bagua(model, [optimizer], AsyncModelAverageAlgorithm("all", 1e9, 2), bucket_bytes=1000), optimizer


def _save(folder: str) -> State:
    rank = bagua.comm.get_rank()
    model, optimizer = _build_after_warm_up()
    train_steps(model, optimizer, rank, range(4))
    torch.save((model.state_dict(), model.bagua_state_dict()), f"{folder}/{rank}")
    return snapshot(model)


def _load(folder: str) -> tuple[State, int, str]:
    rank = bagua.comm.get_rank()
    model, optimizer = _build_after_warm_up()
    weights, state = torch.load(f"{folder}/{rank}")
    model.load_state_dict(weights)
    model.load_bagua_state_dict(state)
    loaded = snapshot(model)
    train_steps(model, optimizer, rank, [4])
    phase = model.bagua_algorithm.status().state
    assert model.bagua_algorithm.abort(model)
    return loaded, model._bagua_engine.reducer.step, phase


@pytest.mark.gloo
def test_a_checkpoint_goes_on_in_its_step_and_phase_in_new_processes(process_ranks, tmp_path):
    saved = process_ranks(2, _save, str(tmp_path))
    for state, (loaded, step, phase) in zip(saved, process_ranks(2, _load, str(tmp_path)), strict=True):
        assert_same_on_all_ranks([state, loaded])
        assert (step, phase) == (5, "averaging")


def _train_until_killed() -> tuple[int, ...]:
    rank = bagua.comm.get_rank()
    model, optimizer = _build()
    with pytest.raises(PeerLostError) as caught:
        while True:
            train_steps(model, optimizer, rank, [0])
            time.sleep(PACE_S)
            if rank == 1 and model.bagua_algorithm.status().rounds >= 2:
                testing.die()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not model.bagua_algorithm.abort(model)
    return caught.value.peers


@pytest.mark.gloo
def test_a_killed_process_is_named_by_the_others(process_pool):
    outcomes = process_pool.outcomes(_train_until_killed, size=3)
    assert [outcome.value for outcome in outcomes if outcome.rank != 1] == [(1,)] * 2, outcomes


SCRIPT = """
import sys
import time
import torch
import bagua.torch_api as bagua
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

bagua.init_process_group(backend="gloo")
rank, ending = bagua.get_rank(), sys.argv[1]
model = torch.nn.Linear(8, 4)
model = model.with_bagua([], AsyncModelAverageAlgorithm(sync_interval_ms=1))

def train():
    model.zero_grad()
    model(torch.ones(4, 8)).square().mean().backward()
    with torch.no_grad():  # An optimizer would import half of torch at its first step.
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad

while model.bagua_algorithm.status().rounds < 2:
    train()
print(time.monotonic(), flush=True)
if ending == "raise":
    raise SystemExit(3)
if ending == "go on":  # until the others have left
    while model.bagua_algorithm._averager._session.member.remaining:
        train()
    print("alone", flush=True)
    model.bagua_algorithm.abort(model)
"""


def _run(endings: list[str], port: int, *, by_agent: bool) -> list[tuple[int, str, str, float]]:
    """Status, output, errors, and at most how many seconds after training the process ended, for each rank."""
    ranks = start_scripts(SCRIPT, endings, port, by_agent=by_agent)
    try:
        results = []
        for rank in ranks:
            output, errors = rank.communicate(timeout=240)
            trained, _, output = output.partition("\n")
            assert trained, errors
            results.append((rank.returncode, output, errors, time.monotonic() - float(trained)))
        return results
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.gloo
def test_scripts_that_end_without_abort_end_at_once_and_others_go_on():
    store, port = serve_store()
    results = _run(["raise", "nothing", "go on"], port, by_agent=True)
    for (status, output, errors, seconds), expected in zip(results, [(3, ""), (0, ""), (0, "alone\n")], strict=True):
        assert (status, output) == expected, errors
        assert "terminate called" not in errors
        assert "Traceback" not in errors
        assert seconds < 60, "somebody waited for somebody else"
    del store


@pytest.mark.gloo
def test_without_the_host_of_the_store_the_others_end_with_an_error_that_says_so():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    host, other = _run(["nothing", "go on"], port, by_agent=False)
    assert host[0] == 0, host[2]
    # Either it saw rank 0 leave in the seconds that rank 0 stayed for it, or it lost the store.
    assert other[0] == 0 or "lost the store" in other[2], other[2]
    assert other[3] < 60
