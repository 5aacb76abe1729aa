"""Loggers of Lightning and of Hugging Face get the metrics without code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import bagua.comm
from bagua.integrations import transformers


@pytest.fixture(autouse=True)
def world():
    bagua.comm.init_process_group()
    yield
    bagua.comm.destroy_process_group()


class Logger:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        assert "comm/overlap" in values
        self.steps.append(step)


def test_lightning_logs_as_often_as_it_does_otherwise():
    lightning = pytest.importorskip("bagua.integrations.lightning", reason="needs the extra lightning")
    logger = Logger()
    strategy = object.__new__(lightning.BaguaStrategy)
    trainer = SimpleNamespace(global_step=0, log_every_n_steps=4, loggers=[logger])
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    for batch in range(24):
        trainer.global_step = batch // 2  # Gradients are accumulated over two batches.
        strategy.on_train_batch_start(None, batch)
    assert logger.steps == [4, 8]


class Trainer:
    def __init__(self) -> None:
        self.callback_handler = SimpleNamespace(callbacks=["reports"])
        kind = SimpleNamespace(value="MULTI_CPU")
        self.accelerator = SimpleNamespace(distributed_type=kind, prepare_model=lambda model: model)

    def add_callback(self, callback: object) -> None:
        self.callback_handler.callbacks.append(callback)

    def create_accelerator_and_postprocess(self) -> None: ...

    def train(self) -> None: ...


def test_what_a_trainer_reports_has_the_metrics_before_anybody_reports_it(monkeypatch):
    module = SimpleNamespace(Trainer=Trainer, TrainerCallback=object)
    monkeypatch.setattr(transformers, "_module_of_transformers", lambda: module)
    trainer = Trainer()
    transformers.attach(trainer, "bytegrad")
    first, second, _ = trainer.callback_handler.callbacks
    assert second == "reports"
    logs = {"loss": 0.5}
    first.on_log(None, None, None, logs=logs)
    assert "comm/overlap" in logs
    evaluated = {"eval_loss": 0.5}
    first.on_log(None, None, None, logs=evaluated)
    assert evaluated == {"eval_loss": 0.5}
