"""Train with Lightning and an algorithm of bagua.

python examples/use_lightning.py --algorithm diloco
"""

import argparse
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import bagua.integrations.lightning  # noqa: F401 - makes "bagua_..." known
from bagua.algorithms import registry

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--algorithm", default="gradient_allreduce", choices=list(registry)
)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument(
    "--checkpoint",
    type=Path,
    metavar="FOLDER",
    help="go on from what is there, and save after each epoch",
)
options = parser.parse_args()


class Student(pl.LightningModule):
    """Learns what another network computes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        inputs, targets = batch
        self.log(
            "loss",
            nn.functional.mse_loss(self.net(inputs), targets),
            sync_dist=True,
        )

    def on_validation_epoch_end(self) -> None:
        loss = float(self.trainer.callback_metrics["loss"])
        self.print(f"epoch {self.current_epoch}  loss {loss:.4f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own_class = registry.get(options.algorithm).optimizer_class
        if own_class is not None:  # QAdam has its own
            return own_class(self.parameters())
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


torch.manual_seed(0)
teacher = nn.Linear(32, 8)
inputs = torch.randn(2048, 32)
data = torch.utils.data.TensorDataset(inputs, teacher(inputs).detach())
training, held_out = (
    torch.utils.data.Subset(data, rows)
    for rows in (range(1536), range(1536, 2048))
)

trainer = pl.Trainer(
    strategy=f"bagua_{options.algorithm}",
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=options.devices,
    max_epochs=options.epochs,
    logger=False,
    enable_checkpointing=options.checkpoint is not None,
    callbacks=[ModelCheckpoint(options.checkpoint, save_last=True)]
    if options.checkpoint is not None
    else [],
    enable_progress_bar=False,
)
loaders = [
    torch.utils.data.DataLoader(part, batch_size=8, shuffle=part is training)
    for part in (training, held_out)
]
model = Student()
saved = options.checkpoint and options.checkpoint / "last.ckpt"
resumed = saved if saved is not None and saved.exists() else None
trainer.fit(model, *loaders, ckpt_path=resumed)

total = sum(parameter.sum().item() for parameter in model.parameters())
print(
    f"rank {trainer.global_rank} of {trainer.world_size} ends with {total:.6f}"
)
