"""Train with torch's DistributedDataParallel, and send gradients of low rank.

torchrun --nproc_per_node 2 examples/use_ddp.py --steps 100
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua.integrations.ddp_comm_hooks import HookState, bagua_hook

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

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
teacher = nn.Linear(32, 8)  # what the model is to learn
model = DistributedDataParallel(
    nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# These two lines are all that is new.
state = HookState("power_sgd")
model.register_comm_hook(state, bagua_hook)

own = options.checkpoint and options.checkpoint / f"rank{rank}.pt"
if own is not None and own.exists():
    saved = torch.load(own)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    # What error feedback still owes: each rank has its own.
    state.load_state_dict(saved["hook"], model)

# Each rank draws other data.
own_part = torch.Generator().manual_seed(1 + rank + 1000 * state.step)
first, last = state.step, state.step + options.steps - 1
for step in range(first, last + 1):
    inputs = torch.randn(64, 32, generator=own_part)
    loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and (step % 50 == 0 or step == last):
        print(f"step {step:>4}  loss {loss.item():.4f}")

if own is not None:
    own.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "hook": state.state_dict(model),
        },
        own,
    )
total = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank} of {dist.get_world_size()} ends with {total:.6f}")
dist.destroy_process_group()
