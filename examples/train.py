"""Train a small language model on the source of Python's standard library.

baguarun --nproc 2 examples/train.py --steps 200
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

CONTEXT, BATCH, WIDTH = 32, 32, 64

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--algorithm", default="gradient_allreduce")
options = parser.parse_args()

bagua.init_process_group()
rank = bagua.get_rank()

files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(
    bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
).long()

model = nn.Sequential(
    nn.Embedding(256, WIDTH),
    nn.Flatten(),
    nn.Linear(CONTEXT * WIDTH, 256),
    nn.GELU(),
    nn.Linear(256, 256),
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
# From here on, every rank has rank 0's weights.
model.with_bagua([optimizer], Algorithm.init(options.algorithm))

# Each rank draws other windows of the text.
own_part = torch.Generator().manual_seed(rank)
for step in range(options.steps):
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=own_part)
    loss = nn.functional.cross_entropy(
        model(text[starts[:, None] + torch.arange(CONTEXT)]),
        text[starts + CONTEXT],
    )
    optimizer.zero_grad()
    loss.backward()  # gradients are averaged over all ranks while this runs
    optimizer.step()
    if rank == 0 and (step % 20 == 0 or step == options.steps - 1):
        print(f"step {step:>4}  loss {loss.item():.3f}")

bagua.destroy_process_group()
