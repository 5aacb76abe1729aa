"""Train with islands that are tasks of Ray, which starts a lost one again.

python examples/use_ray_islands.py --islands 3 --lose
"""

import argparse
import os
import signal
import subprocess
import sys

import ray
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm

EVERY = 5


@ray.remote(num_cpus=1, max_retries=10)
def island(where: str, size: int, steps: int, lose: bool) -> str:
    """What each island does, from its beginning or as a newcomer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    teacher = nn.Linear(32, 8)  # what the model is to learn
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with bagua.join_islands(where, size=size, minimum=1) as islands:
        algorithm = Algorithm.init("diloco", sync_every=EVERY)
        model.with_bagua([optimizer], algorithm, between=islands)
        own_part = torch.Generator().manual_seed(islands.seat)
        step, contributed = 0, ()
        # A task that Ray starts again needs some seconds: wait for it.
        while step < steps or len(contributed) < size:
            inputs = torch.randn(64, 32, generator=own_part)
            target = teacher(inputs).detach()
            loss = nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step = model.bagua_step
            if step % EVERY == 0:
                contributed = islands.members().contributed
            if lose and islands.seat == 1 and step == 2 * EVERY + 1:
                os.kill(os.getpid(), signal.SIGKILL)
    total = sum(parameter.sum().item() for parameter in model.parameters())
    return (
        f"seat {islands.seat} with {list(contributed)}: "
        f"loss {loss.item():.4f}, ends with {total:.6f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--lose", action="store_true", help="kill one of them, to see it"
    )
    options = parser.parse_args()

    # A Ray on this machine; address="auto" finds another.
    ray.init(num_cpus=options.islands, include_dashboard=False)
    host = ray.util.get_node_ip_address()
    command = ["-m", "bagua.cli.baguarun", "--serve-islands", f"{host}:0"]
    store = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True
    )
    where = store.stdout.readline().split()[-1].rstrip(".")
    size, steps = options.islands, options.steps
    tasks = [
        island.remote(where, size, steps, options.lose) for _ in range(size)
    ]
    try:
        print("\n".join(sorted(ray.get(tasks))))
    finally:
        store.terminate()
        ray.shutdown()
