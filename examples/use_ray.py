"""Train on workers of Ray Train, which bagua connects.

python examples/use_ray.py --workers 2 --steps 100
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import bagua.torch_api as bagua
from bagua.integrations.ray import torch_config
from bagua.torch_api.algorithms import Algorithm


def train(settings: dict[str, Any]) -> None:
    """What every worker does; it has a rank when it begins."""
    rank = bagua.get_rank()
    torch.manual_seed(0)
    teacher = nn.Linear(32, 8)  # what the model is to learn
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.with_bagua([optimizer], Algorithm.init(settings["algorithm"]))
    # Each rank draws other data.
    own_part = torch.Generator().manual_seed(1 + rank)
    losses = []
    for _ in range(settings["steps"]):
        inputs = torch.randn(64, 32, generator=own_part)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    total = sum(parameter.sum().item() for parameter in model.parameters())
    line = (
        f"rank {rank} of {bagua.get_world_size()}: "
        f"loss {losses[0]:.4f} to {losses[-1]:.4f}, ends with {total:.6f}\n"
    )
    (Path(settings["folder"]) / f"rank{rank}.txt").write_text(line)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--algorithm", default="bytegrad")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path.cwd(),
        help="that all workers can write to",
    )
    options = parser.parse_args()
    folder = str(options.folder.resolve())

    # A Ray on this machine; address="auto" finds another.
    ray.init(num_cpus=options.workers, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={
            "steps": options.steps,
            "algorithm": options.algorithm,
            "folder": folder,
        },
        torch_config=torch_config(timeout_s=600),  # this is all that is new
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(storage_path=folder),
    ).fit()
    ray.shutdown()
    for path in sorted(options.folder.glob("rank*.txt")):
        print(path.read_text(), end="")
