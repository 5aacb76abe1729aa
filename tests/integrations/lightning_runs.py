"""Modules, data and Trainers for the tests of the Lightning strategy. They run on ranks that exist already."""

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import bagua.comm
import bagua.integrations.lightning  # for the names of strategies
from bagua.cli.demo import ByteTransformer, windows
from bagua.testing.ranks import this_rank
from tests.harness import State, sgd, snapshot

SAMPLES, BATCH = 24, 3


def as_lightning_starts_it() -> None:
    """What a rank finds that Lightning has launched, and none of its advice."""
    os.environ["LOCAL_RANK"] = str(this_rank.get().rank)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Regression(pl.LightningModule):
    """A small model that logs a metric. Ranks start with different weights: the strategy has to make them equal."""

    def __init__(self, optimizer: Callable[[Any], Any] = sgd, normalized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(bagua.comm.get_rank())
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        if normalized:
            self.net.insert(1, nn.BatchNorm1d(8))
        self.make_optimizer = optimizer
        self.seen: list[float] = []

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        loss = self.loss(batch)
        self.seen.append(float(loss))
        self.log("loss", loss, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


class Boring(BoringModel):
    """Lightning's own example, with a fixed start."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.data = torch.randn(64, 32)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        return torch.utils.data.DataLoader(self.data, batch_size=4)

    val_dataloader = train_dataloader


class LanguageModel(pl.LightningModule):
    """The demo's transformer, in small, on the bytes of this file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(bagua.comm.get_rank())
        self.model = ByteTransformer(width=16, depth=1, heads=2, context=16)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return self.model(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        with open(__file__, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
        inputs, targets = windows(text, torch.arange(0, 16 * 32, 16), 16)
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4)


class Adversaries(pl.LightningModule):
    """Two optimizers, stepped by hand: each backward pass leaves half of the parameters without a gradient."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(bagua.comm.get_rank())
        self.generator, self.critic = nn.Linear(4, 2), nn.Linear(2, 1)

    def training_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        for optimizer, sign in zip(self.optimizers(), (-1, 1), strict=True):
            with optimizer.toggle_model():
                difference = self.critic(targets) - self.critic(self.generator(inputs))
                self.manual_backward(sign * difference.tanh().mean())
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


class ByHand(Regression):
    """Accumulates the gradients of two batches by itself."""

    automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer, last = self.optimizers(), index % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch))
        if last:
            optimizer.step()
            optimizer.zero_grad()


def loader() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(SAMPLES, width, generator=generator) for width in (4, 2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH)


def trainer(strategy: Any, epochs: int = 2, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0}
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, **(quiet | options))


def fit(
    strategy: Any, module: Any = None, checkpoint: str | None = None, validate: bool = False, **options: Any
) -> State:
    """Train, and return the weights."""
    module = module or Regression()
    data = loader() if isinstance(module, Regression | Adversaries) else None
    evaluation = loader() if validate else None
    trainer(strategy, **options).fit(module, data, evaluation, ckpt_path=checkpoint)
    return snapshot(module)
