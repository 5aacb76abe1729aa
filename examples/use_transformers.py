"""Train with the Trainer of Transformers, and exchange weights every 20 steps.

torchrun --nproc_per_node 2 examples/use_transformers.py --steps 100
"""

import argparse
import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from bagua.integrations.transformers import attach

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--folder", default=None, help="for checkpoints")
parser.add_argument(
    "--resume", action="store_true", help="from the last one there"
)
options = parser.parse_args()


class Model(nn.Module):
    """A module whose forward pass returns a loss, as in Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8)
        )

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs)
        return {
            "loss": nn.functional.mse_loss(outputs, labels),
            "logits": outputs,
        }


class PrintingTrainer(Trainer):
    """A class that derives from Trainer, as those of TRL do."""

    def compute_loss(self, model, inputs, return_outputs=False, **keywords):
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, **keywords
        )
        if self.state.global_step % 50 == 0 and self.is_world_process_zero():
            print(f"step {self.state.global_step:>4}  loss {loss.item():.4f}")
        return (loss, outputs) if return_outputs else loss


torch.manual_seed(0)
teacher = nn.Linear(32, 8)  # what the model is to learn
inputs = torch.randn(4096, 32)
data = [
    {"inputs": row, "labels": target}
    for row, target in zip(inputs, teacher(inputs).detach(), strict=True)
]
arguments = TrainingArguments(
    options.folder or tempfile.mkdtemp(),
    max_steps=options.steps,
    per_device_train_batch_size=64,
    learning_rate=5e-3,
    save_steps=50,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
    disable_tqdm=True,
    logging_strategy="no",
)
trainer = PrintingTrainer(Model(), arguments, train_dataset=data)
attach(trainer, "diloco", sync_every=20)  # this is all that is new
trainer.train(resume_from_checkpoint=options.resume)

total = sum(parameter.sum().item() for parameter in trainer.model.parameters())
print(
    f"rank {arguments.process_index} of {arguments.world_size}"
    f" ends with {total:.6f}"
)
torch.distributed.destroy_process_group()
