"""Accelerate with a hook of ours, on two processes."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.integrations.ddp_comm_hooks import CodecState
from bagua.testing import ProcessRanks
from bagua.testing.training import State, assert_same_on_all_ranks, mlp, sgd, snapshot, train_steps

accelerate = pytest.importorskip("accelerate", reason="needs the extra accelerate")

from bagua.integrations.accelerate import use_comm_hook  # noqa: E402

pytestmark = pytest.mark.gloo


def _train() -> tuple[State, State, bool]:
    rank = bagua.comm.get_rank()
    # What Accelerate looks for before it finds that torch.distributed is initialized already.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    warnings.simplefilter("ignore")
    states = []
    for compressed in (False, True):
        options = accelerate.DistributedDataParallelKwargs(bucket_cap_mb=7, gradient_as_bucket_view=True)
        accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[options])
        if compressed:
            use_comm_hook(accelerator, CodecState("minmax_uint8"))
        model = mlp()
        prepared, optimizer = accelerator.prepare(model, sgd(model.parameters()))
        assert isinstance(prepared, nn.parallel.DistributedDataParallel)
        assert prepared.gradient_as_bucket_view
        train_steps(prepared, optimizer, rank, range(3))
        states.append(snapshot(accelerator.unwrap_model(prepared)))
    return states[0], states[1], prepared.bucket_bytes_cap == 7 * 2**20


def test_the_hook_compresses_and_options_are_kept():
    first, second = ProcessRanks(2).run(_train)
    for position in (0, 1):
        assert_same_on_all_ranks([first[position], second[position]])
    error = max(float((first[0][name] - first[1][name]).abs().max()) for name in first[0])
    assert 0 < error < 0.02
    assert first[2]
    assert torch.isfinite(torch.tensor(error))
