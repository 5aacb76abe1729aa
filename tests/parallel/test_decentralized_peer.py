"""Equal to decent-dp 0.2.3 where that is installed (``pip install decent-dp==0.2.3``): same seeds, same updates."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

import bagua.comm
from bagua.parallel.decentralized import DecentralizedDataParallel
from tests.harness import State, loss_of, mlp, snapshot
from tests.parallel.decentralized_simulation import BUCKET_MB, plain_sgd

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(importlib.util.find_spec("decent_dp") is None, reason="decent-dp is not installed"),
]
STEPS = 6


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
    for step in range(STEPS):
        for model, seen in ((wrapped, states[0]), (ours, states[1])):
            loss_of(model, rank, step).backward()
            seen.append(snapshot(theirs if model is wrapped else ours))
    return states


@pytest.mark.parametrize(("name", "size"), [("complete", 2), ("complete", 4), ("ring", 2), ("one-peer-exp", 2)])
def test_the_same_updates(process_ranks, name, size):
    """Where the order of rounds does not matter: there it takes them as 2, 4, 5, 6 and so on."""
    for theirs, ours in process_ranks(size, train_both, name):
        # It steps for the first time before the second forward.
        for expected, found in zip(theirs[1:], ours[1:], strict=True):
            for key, value in expected.items():
                assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), key
