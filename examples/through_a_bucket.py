"""Train through a bucket or a folder: no place needs to reach another one.

Start it in two places, or twice on one machine:

python examples/through_a_bucket.py file:///tmp/run --islands 2

On Linux, `unshare --net --map-root-user` before `python` takes the network
away from the process. It trains all the same.
"""

import argparse

import torch
from torch import nn

import bagua
from bagua.errors import LeftOutError
from bagua.torch_api.algorithms import Algorithm

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "where", help="file:///folder, s3://bucket/run, gs:// or az://"
)
parser.add_argument("--islands", type=int, default=2)
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

torch.manual_seed(0)
teacher = nn.Linear(32, 8)  # what the model is to learn
model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
algorithm = Algorithm.init("diloco", sync_every=20)
torch.seed()  # Each island draws other data.


def train(islands):
    """Take the steps that are left, and print the weights, which all share."""
    while model.bagua_step < options.steps:
        inputs = torch.randn(64, 32)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step := model.bagua_step) % 20 == 0:
            contributed = len(islands.members().contributed)
            print(f"step {step}: loss {loss.item():.4f}, {contributed} islands")
    model.bagua_finish()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print(f"norm of the weights {weights.norm().item():.6f}")


while True:
    try:
        with bagua.join_islands(
            options.where, size=options.islands, minimum=1
        ) as islands:
            bagua.with_bagua(model, optimizer, algorithm, between=islands)
            try:
                train(islands)
            finally:
                model.bagua_close()
        break
    except LeftOutError:  # This process was stopped, and the others went on.
        print("left out: comes in again as a newcomer")
