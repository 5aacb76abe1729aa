"""Lightning's own example models through our strategy: ``torchrun ... -m tests.clients.boring_models STRATEGY``."""

import sys
import warnings

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel, ManualOptimBoringModel

import bagua.integrations.lightning

assert bagua.integrations.lightning is not None, "the import makes the names known"
warnings.simplefilter("ignore")

for kind in (BoringModel, ManualOptimBoringModel, DemoModel):
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, limit_train_batches=8, limit_val_batches=2,
        limit_test_batches=2, enable_progress_bar=False, enable_checkpointing=False, logger=False,
    )  # fmt: skip
    model, data = kind(), BoringDataModule()
    trainer.fit(model, data)
    if kind is not DemoModel:
        trainer.validate(model, data)
        trainer.test(model, data)
        trainer.predict(model, data)
print("trained")
