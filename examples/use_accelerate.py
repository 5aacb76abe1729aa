"""Train with Hugging Face Accelerate, and exchange weights every 20 steps.

torchrun --nproc_per_node 2 examples/use_accelerate.py --steps 100
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from bagua.integrations.accelerate import attach

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument(
    "--checkpoint",
    type=Path,
    metavar="FOLDER",
    help="go on from what is there, and save at the end",
)
options = parser.parse_args()

accelerator = Accelerator(cpu=not torch.cuda.is_available())
attach(accelerator, "diloco", sync_every=20)  # this is all that is new

torch.manual_seed(0)
teacher = nn.Linear(32, 8)  # what the model is to learn
inputs = torch.randn(4096, 32)
data = torch.utils.data.TensorDataset(inputs, teacher(inputs).detach())
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if options.checkpoint and options.checkpoint.exists():
    accelerator.load_state(options.checkpoint)

step = 0
while step < options.steps:
    for batch, targets in loader:
        loss = nn.functional.mse_loss(model(batch), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if step % 50 == 0 or step == options.steps - 1:
            accelerator.print(f"step {step:>4}  loss {loss.item():.4f}")
        step += 1
        if step == options.steps:
            break

if options.checkpoint:
    accelerator.save_state(options.checkpoint)
model.bagua_finish()  # one model of those of all ranks
total = sum(parameter.sum().item() for parameter in model.parameters())
print(
    f"rank {accelerator.process_index} of {accelerator.num_processes}"
    f" ends with {total:.6f}"
)
accelerator.end_training()
