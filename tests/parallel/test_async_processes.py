"""Asynchronous averaging between processes: both transports, a kill, Ctrl-C, and scripts that just end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest
import torch

import bagua.comm
from bagua import testing
from bagua.algorithms import AsyncModelAverageAlgorithm
from bagua.errors import CommunicatorClosedError, PeerLostError
from tests.harness import State, assert_same_on_all_ranks
from tests.launching import PATIENCE_S, free_port, launched
from tests.parallel.test_async import Averaged, averages_of
from tests.parallel.wrapping import of_this_rank

pytestmark = pytest.mark.timeout(600)


def _averaged() -> Averaged:
    """A model that has been averaged, from weights of each rank's own."""
    loop = Averaged(AsyncModelAverageAlgorithm("all", 1), make=of_this_rank)
    loop.train_until_averaged()
    return loop


def _train_and_abort() -> State:
    return _averaged().abort()


def test_models_are_equal_after_abort(ranks):
    assert_same_on_all_ranks(ranks(2, _train_and_abort))


def _abort_in_a_child() -> int:
    """The exit status of a forked child that calls ``abort``; its parent averages on."""
    loop = _averaged()
    child = os.fork()
    if not child:
        signal.alarm(60)
        status = 1
        try:
            loop.abort()
        except CommunicatorClosedError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    loop.train_until_averaged()
    loop.abort()
    return os.waitstatus_to_exitcode(ended)


def test_a_forked_child_does_not_wait_for_the_end(process_ranks):
    assert process_ranks(2, _abort_in_a_child) == [0, 0]


def _train_until_killed() -> tuple[int, ...]:
    loop = _averaged()
    with pytest.raises(PeerLostError) as caught:
        loop.train_until(lambda: loop.rank == 1 and averages_of(loop.model) >= 2)
        testing.die()
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())
    with pytest.raises(PeerLostError):
        loop.abort()
    return caught.value.peers


def test_a_killed_process_is_named_by_the_others(process_pool):
    outcomes = process_pool.outcomes(_train_until_killed, size=3)
    assert [outcome.value for outcome in outcomes if outcome.rank != 1] == [(1,)] * 2, outcomes


def _interrupt_abort() -> State:
    """Rank 0 is interrupted in ``abort``, in which it waits for the other one, and aborts again."""
    loop = _averaged()
    if loop.rank == 0:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            loop.abort()
    bagua.comm.get_default_group().global_communicator.barrier()
    return loop.abort()


def test_ctrl_c_ends_the_wait_in_abort(process_ranks):
    assert_same_on_all_ranks(process_ranks(2, _interrupt_abort))


SCRIPT = """
import sys
import time
import torch
import bagua.torch_api as bagua
from bagua.errors import CommunicatorClosedError, PeerLostError
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

while bagua.metrics().get("comm/averages", 0) < 2:
    train()
if ending == "raise":
    raise SystemExit(3)
if ending == "crash":
    raise ValueError("a bug")
try:
    while ending == "go on" and model.bagua_algorithm._averager._thread.is_alive():
        train()
    train()
    if ending == "go on":
        model.bagua_algorithm.abort(model)
except PeerLostError as error:
    print(error.peers[0], flush=True)
"""


def _run(endings: list[str], port: int | None = None) -> list[tuple[int, str, str]]:
    """Status, output and errors of each rank."""
    started = launched(
        len(endings), "-c", SCRIPT, each=endings, port=port, stderr=subprocess.PIPE, BAGUA_TIMEOUT_S="60"
    )
    with started as ranks:
        said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
        return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


@pytest.mark.gloo
@pytest.mark.parametrize("ending", ["raise", "crash"])
def test_scripts_that_end_without_abort_are_named_by_those_that_go_on(ending):
    statuses = {"raise": 3, "crash": 1}
    (ended, _, errors), (status, output, others) = _run([ending, "go on"])
    assert (ended, status, output) == (statuses[ending], 0, "0\n"), (errors, others)
    assert "terminate called" not in errors + others
    assert ("goes on without averages" in others) == (ending == "raise"), others


@pytest.mark.gloo
def test_scripts_that_forget_abort_end_well():
    """Also where the first of them hosts the store."""
    for status, output, errors in _run(["nothing"] * 3, free_port()):
        assert (status, output) == (0, ""), errors
        assert "terminate called" not in errors
        assert "Traceback" not in errors
