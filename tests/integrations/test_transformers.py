"""The Trainer of Transformers with an algorithm of ours, on two processes."""

import importlib
import logging
import os
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bagua.comm
from bagua.errors import ConfigurationError, InvalidTypeError
from bagua.integrations.transformers import attach
from bagua.parallel import BaguaModule, with_bagua
from tests.harness import State, assert_same_on_all_ranks, on_ranks, snapshot
from tests.integrations.one_pair import as_torchrun_starts_it, of_all_ranks

transformers = pytest.importorskip("transformers", reason="needs the extra transformers")
pytest.importorskip("accelerate", reason="needs the extra transformers")

pytestmark = pytest.mark.gloo
BEGIN = as_torchrun_starts_it
STEPS = 6
NAMES = ("ddp", "gradient_allreduce")


class Model(nn.Module):
    """What a Trainer takes: a dictionary with the loss. Ranks begin with different weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs).squeeze(-1)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def make_trainer(folder: str, kind: type | None = None, model: type[Model] = Model, **options: Any) -> Any:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = [{"inputs": row, "labels": row[0] * row[1]} for row in inputs]
    arguments = {
        "max_steps": STEPS, "save_steps": STEPS // 2, "eval_strategy": "steps", "eval_steps": 2,
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_strategy": "no", **options,
    }  # fmt: skip
    given = model(int(os.environ.get("RANK", "0"))), transformers.TrainingArguments(folder, **arguments)
    return (kind or transformers.Trainer)(*given, train_dataset=data, eval_dataset=data[:8])


def train(name: str, folder: str, checkpoint: str | None = None, **options: Any) -> tuple[State, Any]:
    """The weights in the end, and the trainer."""
    trainer = make_trainer(folder, **options)
    if name == "diloco":  # The checkpoint after three steps is saved while an exchange is under way.
        attach(trainer, name, sync_every=2, overlap=1, find_unused_parameters=False)
    elif name != "ddp":
        attach(trainer, name)
    trainer.train(resume_from_checkpoint=checkpoint)
    return snapshot(trainer.model), trainer


@on_ranks(2, pool="pair")
def test_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path) -> None:
    ends = {}
    for name in (*NAMES, "bytegrad", "decentralized", "low_precision_decentralized", "async", "diloco"):
        ends[name], trainer = train(name, f"{tmp_path}/{name}")
        resumed, _ = train(name, f"{tmp_path}/{name}", f"{tmp_path}/{name}/checkpoint-{STEPS // 2}")
        assert_same_on_all_ranks([*of_all_ranks(ends[name]), resumed])
        assert type(trainer.model_wrapped).__name__ == ("DistributedDataParallel" if name == "ddp" else "Model")
    assert_same_on_all_ranks([ends[name] for name in NAMES])


def train_both(folder: Path, **options: Any) -> list[Any]:
    """The trainers of DDP and of our mean of gradients, which end with the same."""
    states, trainers = zip(*(train(name, f"{folder}/{name}", **options) for name in NAMES), strict=True)
    assert_same_on_all_ranks(states)
    return trainers


@on_ranks(2, pool="pair")
def test_gradients_are_those_of_ddp_when_accumulated_and_clipped(tmp_path: Path) -> None:
    train_both(tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.1, save_strategy="epoch")


class PreferenceTrainer(transformers.Trainer):
    """As the trainers of TRL: a loss of its own, and metrics that it stores while it computes them."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        rejected = model(inputs["inputs"].flip(1), inputs["labels"])["loss"]
        self.margin = float(rejected.detach() - outputs["loss"].detach())
        loss = nn.functional.softplus(outputs["loss"] - rejected)
        return (loss, outputs) if return_outputs else loss


@on_ranks(2, pool="pair")
def test_gradients_are_those_of_ddp_with_a_derived_trainer(tmp_path: Path) -> None:
    assert all(trainer.margin for trainer in train_both(tmp_path, kind=PreferenceTrainer))


class TooLarge(Model):
    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(inputs) > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return super().forward(inputs, labels)


@on_ranks(2, pool="pair")
def test_a_batch_that_fits_is_found(tmp_path: Path) -> None:
    logged: list[str] = []

    def hear(record: logging.LogRecord) -> bool:
        logged.append(record.getMessage())
        return False

    logging.getLogger("bagua").addFilter(hear)
    train_both(tmp_path, model=TooLarge, eval_strategy="no", auto_find_batch_size=True)
    logging.getLogger("bagua").removeFilter(hear)
    assert not [text for text in logged if "wrapped" in text]


def searching_trainer(folder: str, **options: Any) -> Any:
    trainer = make_trainer(folder, eval_strategy="no", **options)
    trainer.model_init = lambda: Model(bagua.comm.get_rank())
    attach(trainer, "diloco")
    return trainer


@on_ranks(2, pool="pair")
def test_each_trial_of_a_search_saves_in_its_folder_and_begins_anew(tmp_path: Path) -> None:
    """Two trials as a search for hyperparameters runs them; then the second one by itself."""
    trainer, last = searching_trainer(str(tmp_path)), searching_trainer(f"{tmp_path}/alone", learning_rate=0.01)
    trainer.hp_search_backend = transformers.trainer_utils.HPSearchBackend.OPTUNA
    trainer.hp_space, trainer.hp_name = (lambda trial: trial.params), None
    # Optuna need not be installed.
    importlib.import_module("transformers.integrations").hp_params = trainer.hp_space
    ends = []
    for number, rate in enumerate((0.02, 0.01)):
        trainer.train(trial=types.SimpleNamespace(number=number, params={"learning_rate": rate}))
        ends.append(snapshot(trainer.model))
    last.train()
    (first, second), alone = ends, snapshot(last.model)
    assert_same_on_all_ranks([second, alone])
    assert not all(torch.equal(first[key], alone[key]) for key in alone)
    of_all_ranks(None)  # All have saved.
    for step in (STEPS // 2, STEPS):
        files = {file.relative_to(tmp_path) for file in tmp_path.glob(f"**/checkpoint-{step}/bagua-rank?.pt")}
        folders = [Path(name) for name in ("run-0", "run-1", "alone")]
        assert files == {one / f"checkpoint-{step}/bagua-rank{rank}.pt" for one in folders for rank in (0, 1)}


def test_one_process_is_warned_and_trains(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(str(tmp_path))
    with pytest.warns(UserWarning, match="torchrun.*accelerate launch --cpu"):
        attach(trainer, "bytegrad")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
        assert isinstance(trainer.model, BaguaModule)
        trainer.train()  # anew
    with pytest.raises(ConfigurationError, match="already"):
        attach(trainer, "bytegrad")


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"accelerate\.attach"):
        attach(nn.Linear(2, 2), "bytegrad")


@on_ranks(2, pool="pair")
def test_a_wrapped_model_and_a_checkpoint_without_bagua(tmp_path: Path) -> None:
    folder = str(tmp_path)
    train("ddp", folder)
    checkpoint = f"{folder}/checkpoint-{STEPS // 2}"
    with pytest.warns(UserWarning, match="saved without bagua"):
        train("bytegrad", folder, checkpoint)
    if bagua.comm.get_rank() == 1:
        Path(f"{checkpoint}/bagua-rank1.pt").write_bytes(b"half of a file")
    with pytest.raises(ConfigurationError, match="rank 0: no file; rank 1: a file that cannot be read"):
        train("bytegrad", folder, checkpoint)
    trainer = make_trainer(folder)
    with_bagua(trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1), "bytegrad")
    with pytest.raises(ConfigurationError, match="attach"):
        trainer.train()
