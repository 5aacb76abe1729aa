"""Accelerate with a hook of ours, on two processes."""

from __future__ import annotations

import os
import types
import warnings

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.errors import ConfigurationError
from bagua.integrations.ddp_comm_hooks import CodecState
from bagua.parallel import with_bagua
from bagua.testing import ProcessRanks
from bagua.testing.training import State, assert_same_on_all_ranks, mlp, sgd, snapshot, train_steps

accelerate = pytest.importorskip("accelerate", reason="needs the extra accelerate")

from bagua.integrations.accelerate import CommHookKwargs, use_comm_hook  # noqa: E402

pytestmark = pytest.mark.gloo


def _as_torchrun_starts_it() -> None:
    rank = bagua.comm.get_rank()
    # What Accelerate looks for before it finds that torch.distributed is initialized already.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    warnings.simplefilter("ignore")


def _train() -> tuple[State, State, bool]:
    _as_torchrun_starts_it()
    rank = bagua.comm.get_rank()
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


def _prepare_what_is_wrapped() -> tuple[str, State, State, list[str]]:
    _as_torchrun_starts_it()
    rank = bagua.comm.get_rank()
    accelerator = accelerate.Accelerator(cpu=True)
    model = with_bagua(mlp(), sgd(mlp().parameters()), "gradient_allreduce")
    with pytest.raises(ConfigurationError) as refused:
        accelerator.prepare(model)(torch.ones(1, 8))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        use_comm_hook(accelerator, CodecState("minmax_uint8"))
        use_comm_hook(accelerator, CodecState("minmax_uint8"))
    # What the page says: all but the model goes through prepare.
    model, other = mlp(), mlp()
    optimizer = accelerator.prepare(sgd(model.parameters()))
    with_bagua(model, optimizer.optimizer, "gradient_allreduce")
    accelerator.ddp_handler = None
    prepared, its_optimizer = accelerator.prepare(other, sgd(other.parameters()))
    train_steps(model, optimizer, rank, range(3))
    train_steps(prepared, its_optimizer, rank, range(3))
    return str(refused.value), snapshot(model), snapshot(other), [str(warning.message) for warning in warned]


def test_a_wrapped_model_is_not_prepared():
    for refused, ours, theirs, warned in ProcessRanks(2).run(_prepare_what_is_wrapped):
        assert "use_comm_hook" in refused
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert len(warned) == 1
        assert "prepared already (1)" in warned[0]


def _forget_to_prepare_the_model() -> list[list[str]]:
    _as_torchrun_starts_it()
    told = []
    for prepares in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        state = CodecState("minmax_uint8")
        use_comm_hook(accelerator, state)
        model = mlp()
        optimizer = accelerator.prepare(sgd(model.parameters()))
        if prepares:
            model = accelerator.prepare(model)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                accelerator.backward(model(torch.ones(2, 8)).sum())
                optimizer.step()
        told.append([str(one.message) for one in warned if "use_comm_hook" in str(one.message)])
    return told


def test_a_model_that_was_not_prepared_is_told_once():
    for forgotten, prepared in ProcessRanks(2).run(_forget_to_prepare_the_model):
        assert len(forgotten) == 1
        assert "no model was prepared" in forgotten[0]
        assert prepared == []


def test_a_hook_that_nobody_calls_is_told(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one = types.SimpleNamespace(distributed_type=accelerate.DistributedType.NO, ddp_handler=None, _models=[])
    with pytest.warns(UserWarning, match="torchrun.*accelerate launch --cpu"):
        use_comm_hook(one, CodecState("minmax_uint8"))
    assert isinstance(one.ddp_handler, CommHookKwargs)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"started 2 processes.*Accelerator\(cpu=True\)"):
        use_comm_hook(one, CodecState("minmax_uint8"))
    sharded = types.SimpleNamespace(distributed_type=accelerate.DistributedType.FSDP, ddp_handler=None, _models=[])
    with pytest.raises(ConfigurationError, match=r"FSDP.*register_fsdp_hook"):
        use_comm_hook(sharded, CodecState("minmax_uint8"))
