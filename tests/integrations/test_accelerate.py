"""Accelerate with an algorithm of ours, on two processes."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.errors import ConfigurationError
from bagua.parallel import BaguaModule, with_bagua
from tests.harness import assert_same_on_all_ranks, mlp, on_ranks, sgd, snapshot, train_steps

accelerate = pytest.importorskip("accelerate", reason="needs the extra accelerate")

from bagua.integrations._attached import read_own_file, write_own_file  # noqa: E402
from bagua.integrations.accelerate import attach  # noqa: E402
from tests.integrations.one_pair import as_torchrun_starts_it, of_all_ranks  # noqa: E402

pytestmark = pytest.mark.gloo
BEGIN = as_torchrun_starts_it


@on_ranks(2, pool="pair")
def test_a_wrapped_model_is_not_prepared() -> None:
    rank = bagua.comm.get_rank()
    accelerator = accelerate.Accelerator(cpu=True)
    model = with_bagua(mlp(), sgd(mlp().parameters()), "gradient_allreduce")
    with pytest.raises(ConfigurationError, match="attach"):
        accelerator.prepare(model)(torch.ones(1, 8))
    # What the page says: all but the model goes through prepare.
    model, other = mlp(), mlp()
    optimizer = accelerator.prepare(sgd(model.parameters()))
    with_bagua(model, optimizer.optimizer, "gradient_allreduce")
    prepared, its_optimizer = accelerator.prepare(other, sgd(other.parameters()))
    train_steps(model, optimizer, rank, range(3))
    train_steps(prepared, its_optimizer, rank, range(3))
    assert_same_on_all_ranks([snapshot(model), snapshot(other)])


def test_an_accelerator_that_trains_nothing_together_is_told(monkeypatch):
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match=r"started 2 processes.*Accelerator\(cpu=True\)"):
        attach(accelerator, "bytegrad")


#: The checkpoint after three steps is saved while an exchange of ``diloco`` is under way.
STEPS, SAVED_AFTER = 6, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {}, "diloco": {"sync_every": 2, "overlap": 1}, "local_sgd": {"sync_every": 4},
}  # fmt: skip


def _attached(name: str) -> tuple[Any, nn.Module, Any]:
    accelerator = accelerate.Accelerator(cpu=True)
    attach(accelerator, name, bucket_bytes=256, **OPTIONS[name])
    model = mlp(seed=bagua.comm.get_rank())
    prepared, optimizer = accelerator.prepare(model, sgd(model.parameters()))
    assert prepared is model
    assert isinstance(model, BaguaModule)
    return accelerator, model, optimizer


@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2, pool="pair")
def test_an_algorithm_trains_as_by_hand_and_goes_on_from_a_saved_state(name: str, tmp_path: Path) -> None:
    rank, folder = bagua.comm.get_rank(), str(tmp_path)
    accelerator, model, optimizer = _attached(name)
    train_steps(model, optimizer, rank, range(SAVED_AFTER))
    accelerator.save_state(folder)
    train_steps(model, optimizer, rank, range(SAVED_AFTER, STEPS))
    whole = snapshot(model)
    by_hand = mlp(seed=rank)
    called, optimizer = by_hand, sgd(by_hand.parameters())
    if name == "gradient_allreduce":  # What DDP does.
        called, optimizer = accelerate.Accelerator(cpu=True).prepare(by_hand, optimizer)
    else:
        with_bagua(by_hand, optimizer, bagua.algorithms.Algorithm.init(name, **OPTIONS[name]))
    train_steps(called, optimizer, rank, range(STEPS))
    assert_same_on_all_ranks([whole, snapshot(by_hand)])
    if name == "local_sgd":  # It has trained alone for two steps.
        own, other = of_all_ranks(whole)
        assert not torch.equal(own["0.weight"], other["0.weight"])

    accelerator, model, optimizer = _attached(name)
    accelerator.load_state(folder)
    train_steps(model, optimizer, rank, range(SAVED_AFTER, STEPS))
    assert_same_on_all_ranks([whole, snapshot(model)])
    model.bagua_finish()
    assert_same_on_all_ranks(of_all_ranks(snapshot(model)))

    accelerator, model, optimizer = _attached(name)
    with accelerator.accumulate(model):
        assert model._bagua_engine.synchronize
    with accelerator.no_sync(model):
        assert not model._bagua_engine.synchronize


def test_the_file_of_one_rank_serves_any_number_of_ranks(tmp_path: Path):
    saved = {"remembered": {"step": 3}, "weights": {"a": torch.ones(1)}, "optimizers": []}
    write_own_file(tmp_path, 0, 2, [saved])
    assert read_own_file(tmp_path, 0, 2) == [saved]
    assert read_own_file(tmp_path, 2, 3) == [{"remembered": {"step": 3}}]
    (tmp_path / "bagua-rank0.pt").rename(tmp_path / "bagua-rank1.pt")
    assert read_own_file(tmp_path, 1, 3) == [{"remembered": {"step": 3}}]
    with pytest.warns(UserWarning, match="without bagua"):
        assert read_own_file(tmp_path / "other", 0, 2) == []


def test_what_cannot_be_attached_is_refused():
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="sync_every"):
        attach(accelerator, "diloco", sync_every=0)
    with pytest.warns(UserWarning, match="one process"):
        attach(accelerator, "diloco", sync_every=2)
    with pytest.raises(ConfigurationError, match="attached already"):
        attach(accelerator, "diloco")
    with pytest.raises(ConfigurationError, match="without the optimizer"):
        accelerator.prepare(mlp())
    frozen = mlp().requires_grad_(requires_grad=False)
    assert not isinstance(accelerator.prepare(frozen), BaguaModule)
    model = mlp()
    optimizer = accelerator.prepare(sgd(model.parameters()))
    assert isinstance(accelerator.prepare(model), BaguaModule)
    assert accelerator.prepare(model) is model
    train_steps(model, optimizer, 0, range(2))
    with pytest.raises(ConfigurationError, match="without the optimizer"):
        accelerator.prepare_model(mlp())
    assert not isinstance(accelerator.prepare_model(mlp(), evaluation_mode=True), BaguaModule)
    sharded = types.SimpleNamespace(distributed_type=accelerate.DistributedType.FSDP, _models=[])
    with pytest.raises(ConfigurationError, match=r"FSDP.*register_fsdp_hook"):
        attach(sharded, "diloco")
