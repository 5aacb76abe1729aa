"""The strategy, with the real Trainer on two processes. Lightning takes seconds to import, so few runs test much."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.algorithms import GradientAllReduceAlgorithm, registry
from bagua.errors import ConfigurationError, UnsupportedAlgorithmException
from bagua.testing import ProcessRanks
from bagua.testing.ranks import this_rank
from bagua.testing.training import State, assert_close, assert_same_on_all_ranks, snapshot

pl = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

from bagua.integrations.lightning import BaguaStrategy  # noqa: E402

pytestmark = pytest.mark.gloo

SAMPLES, BATCH = 24, 3


class Regression(pl.LightningModule):
    """A small model that logs a metric, and by default steps with SGD."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(bagua.comm.get_rank())  # The strategy makes ranks equal, not the seed.
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.make_optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.seen: list[float] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.seen.append(float(self.loss(batch)))
        self.log("loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


def _loader() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 2, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH)


def _trainer(strategy: Any, epochs: int = 2, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **options,
    )  # fmt: skip


def _fit(strategy: Any, module: Regression | None = None, **options: Any) -> State:
    module = module or Regression()
    validate = options.pop("validate", False)
    checkpoint = options.pop("checkpoint", None)
    _trainer(strategy, **options).fit(module, _loader(), _loader() if validate else None, ckpt_path=checkpoint)
    return snapshot(module)


def _as_lightning_starts_it() -> None:
    os.environ["LOCAL_RANK"] = str(this_rank.get().rank)
    warnings.simplefilter("ignore")  # Lightning has much to say about small data.


# Training, and equality with Lightning's own strategy.


def _compare_and_use(directory: str) -> dict[str, Any]:
    _as_lightning_starts_it()
    found: dict[str, Any] = {
        "ddp": _fit("ddp"),
        "bagua": _fit("bagua"),
        "ddp, accumulated": _fit("ddp", accumulate_grad_batches=2),
        "bfloat16": _fit("bagua", precision="bf16-mixed"),
    }
    calls = bagua.comm.stats()["allreduce"].calls
    found["bagua, accumulated"] = _fit(BaguaStrategy(GradientAllReduceAlgorithm()), accumulate_grad_batches=2)
    found["calls, accumulated"] = bagua.comm.stats()["allreduce"].calls - calls
    module, trainer = Regression(), _trainer("bagua_bytegrad", 1, check_val_every_n_epoch=1)
    trainer.fit(module, _loader(), _loader())
    found["metric"] = (float(trainer.callback_metrics["loss"]), module.seen)
    found["tested"] = trainer.validate(module, _loader(), verbose=False) + trainer.test(
        module, _loader(), verbose=False
    )
    found["predicted"] = sum(len(part) for part in trainer.predict(module, _loader()))
    found["parameters are plain"] = type(module) is Regression and not list(module.net[0]._forward_hooks)
    return found


def test_training_equals_ddp_and_all_verbs_work(tmp_path):
    first, second = ProcessRanks(2).run(_compare_and_use, str(tmp_path))
    for kind in ("ddp", "bagua", "bagua, accumulated", "bfloat16"):
        assert_same_on_all_ranks([first[kind], second[kind]])
    assert_close(first["bagua"], first["ddp"])
    assert_close(first["bagua, accumulated"], first["ddp, accumulated"])
    assert not torch.allclose(first["bagua"]["net.0.weight"], first["ddp, accumulated"]["net.0.weight"])
    steps = 2 * SAMPLES // BATCH // 2 // 2
    assert first["calls, accumulated"] <= steps + 2, "gradients were exchanged while they were accumulated"
    metric, seen = first["metric"]
    assert seen != second["metric"][1]
    assert metric == pytest.approx(sum(seen + second["metric"][1]) / (2 * len(seen)), rel=1e-5)
    assert first["tested"] == second["tested"]
    assert first["predicted"] == SAMPLES // 2
    assert first["parameters are plain"]


# Every algorithm.


class SaveOnce(pl.Callback):
    """Writes a checkpoint at the end of the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _stop_and_go_on(directory: str) -> dict[str, tuple[State, State]]:
    _as_lightning_starts_it()
    found = {}
    for name in registry:
        make = registry.get(name).optimizer_class
        optimizer = None if make is None else lambda parameters, make=make: make(parameters, lr=0.01, warmup_steps=2)
        path = str(Path(directory) / f"{name}.ckpt")
        whole = _fit(f"bagua_{name}", Regression(optimizer), callbacks=[SaveOnce(path)], validate=True)
        resumed = _fit(f"bagua_{name}", Regression(optimizer), checkpoint=path)
        found[name] = (whole, resumed)
    return found


def test_every_algorithm_trains_checkpoints_and_resumes(tmp_path):
    first, second = ProcessRanks(2, deadline_s=100).run(_stop_and_go_on, str(tmp_path))
    start = snapshot(Regression())
    for name in registry:
        traits = registry.get(name).implementation.traits
        for (whole, resumed), (elsewhere, _) in ((first[name], second[name]), (second[name], first[name])):
            assert all(value.isfinite().all() for value in resumed.values()), name
            assert any(not torch.equal(value, start[key]) for key, value in whole.items()), name
            if traits.result != "consensus" or traits.background:
                assert_same_on_all_ranks([whole, elsewhere])
            if not traits.background:  # What comes of those is not the same twice.
                assert_same_on_all_ranks([whole, resumed])
    assert not torch.equal(first["decentralized"][0]["net.0.weight"], first["gradient_allreduce"][0]["net.0.weight"])


# What cannot be.


def _of_two_optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    halves = list(parameters)
    return [torch.optim.SGD(halves[:2], lr=0.1), torch.optim.SGD(halves[2:], lr=0.1)]


def _refused() -> list[str]:
    _as_lightning_starts_it()
    several = Regression(_of_two_optimizers)
    several.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=r"one optimizer.*2 optimizers") as first:
        _fit("bagua_low_precision_decentralized", several)
    with pytest.raises(ConfigurationError, match="QAdamOptimizer") as second:
        _fit("bagua_qadam")
    return [type(first.value).__name__, type(second.value).__name__]


def test_optimizers_that_an_algorithm_cannot_use_are_refused():
    assert ProcessRanks(2).run(_refused) == [["ConfigurationError", "ConfigurationError"]] * 2


def test_unknown_names_and_options_are_named():
    with pytest.raises(UnsupportedAlgorithmException, match="gradient_allreduce"):
        BaguaStrategy("bogus")
    with pytest.raises(TypeError, match=r"gradient_as_bucket_view.*bucket_bytes"):
        BaguaStrategy(gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match="bagua_bogus"):
        _trainer("bagua_bogus")
