"""Exchange weights every 20 steps, through one of three entry points.

baguarun --nproc 2 examples/talk_rarely.py --steps 100
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument(
    "--entry",
    choices=("with_bagua", "bagua_init", "switch_to"),
    default="with_bagua",
)
parser.add_argument(
    "--checkpoint",
    type=Path,
    metavar="FOLDER",
    help="go on from what is there, and save at the end",
)
options = parser.parse_args()

bagua.init_process_group()
rank = bagua.get_rank()
torch.manual_seed(0)
teacher = nn.Linear(32, 8)  # what the model is to learn
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(first: int, last: int) -> None:
    """Each rank draws other data."""
    for step in range(first, last + 1):
        own_part = torch.Generator().manual_seed(1 + rank + 1000 * step)
        inputs = torch.randn(64, 32, generator=own_part)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 50 == 0 or step == last):
            print(f"step {step:>4}  loss {loss.item():.4f}")


diloco = Algorithm.init("diloco", sync_every=20)
own = options.checkpoint and options.checkpoint / f"rank{rank}.pt"
saved = torch.load(own) if own is not None and own.exists() else None
done = saved["step"] if saved else 0

if options.entry == "with_bagua":
    model = bagua.with_bagua(model, optimizer, diloco)
elif options.entry == "bagua_init":
    model, optimizer = bagua.bagua_init(model, optimizer, diloco)
else:
    model, optimizer = bagua.bagua_init(model, optimizer, "gradient_allreduce")
    if not done:
        done = 10
        train(0, done - 1)  # These steps exchange gradients.
    model.switch_to(diloco)
if saved:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model.bagua_load_state_dict(saved["algorithm"])
train(done, done + options.steps - 1)

if own is not None:
    own.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "step": done + options.steps,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "algorithm": model.bagua_state_dict(),
        },
        own,
    )
model.bagua_finish()  # one model of those of all ranks
total = sum(p.sum().item() for p in model.parameters())
print(f"rank {rank} of {bagua.get_world_size()} ends with {total:.6f}")
bagua.destroy_process_group()
