"""Train with Lightning's Fabric, and exchange weights every 20 steps.

torchrun --nproc_per_node 2 examples/use_fabric.py --steps 100
"""

import argparse
import os
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn

from bagua.algorithms import Algorithm
from bagua.integrations.fabric import BaguaStrategy

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument(
    "--checkpoint",
    type=Path,
    metavar="FILE",
    help="go on from what is there, and save at the end",
)
options = parser.parse_args()

# strategy="bagua_diloco" has the options by default.
fabric = Fabric(
    strategy=BaguaStrategy(Algorithm.init("diloco", sync_every=20)),
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
)
fabric.launch()

torch.manual_seed(0)
teacher = nn.Linear(32, 8)  # what the model is to learn
network = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
model, optimizer = fabric.setup(
    network, torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
)
state = {"model": model, "optimizer": optimizer, "step": 0}
if options.checkpoint is not None and options.checkpoint.exists():
    fabric.load(options.checkpoint, state)

first, last = state["step"], state["step"] + options.steps - 1
for step in range(first, last + 1):
    # Each rank draws other data.
    own_part = torch.Generator().manual_seed(
        1 + fabric.global_rank + 1000 * step
    )
    inputs = torch.randn(64, 32, generator=own_part)
    loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    if step % 50 == 0 or step == last:
        fabric.print(f"step {step:>4}  loss {loss.item():.4f}")

state["step"] = last + 1
if options.checkpoint is not None:
    fabric.save(options.checkpoint, state)
fabric.strategy.finish(model)  # one model of those of all ranks
total = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {fabric.global_rank} of {fabric.world_size} ends with {total:.6f}")
