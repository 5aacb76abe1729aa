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


def train_both(name: str, order: str, factor: float) -> tuple[list[State], list[State]]:
    importlib.import_module("loguru").logger.disable("decent_dp")
    peer = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel
    rank, size = bagua.comm.get_rank(), bagua.comm.get_world_size()
    theirs = mlp()
    torch.set_num_threads(1)
    wrapped = peer(theirs, plain_sgd, topology=name, bucket_size_in_mb=25, _local_world_size=1)
    ours = DecentralizedDataParallel(
        mlp(), plain_sgd, topology=name, bucket_size_in_mb=BUCKET_MB, _local_world_size=1, round_order=order
    )
    assert size > 1
    if factor != 1.0:
        wrapped.set_adaptive_factor(factor)
        ours.set_adaptive_factor(factor)
    states: tuple[list[State], list[State]] = ([], [])
    for step in range(STEPS):
        for model, seen in ((wrapped, states[0]), (ours, states[1])):
            loss_of(model, rank, step).backward()
            seen.append(snapshot(theirs if model is wrapped else ours))
    return states


@pytest.mark.parametrize(
    ("name", "size", "order", "factor"),
    [
        ("complete", 2, "in turn", 0.3),
        ("complete", 4, "in turn", 1.0),
        ("ring", 2, "in turn", 1.0),
        ("ring", 4, "decent-dp", 0.5),
        ("one-peer-exp", 4, "decent-dp", 1.0),
    ],
)
def test_the_same_updates(process_ranks, name, size, order, factor):
    for theirs, ours in process_ranks(size, train_both, name, order, factor):
        # It steps for the first time before the second forward.
        for expected, found in zip(theirs[1:], ours[1:], strict=True):
            for key, value in expected.items():
                assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-6), key
