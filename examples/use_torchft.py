"""Train on when replicas are lost: torchft's manager, and groups of bagua.

torchft_lighthouse --min_replicas 1 --bind 127.0.0.1:29510
python examples/use_torchft.py --lighthouse http://127.0.0.1:29510 --replica 0
python examples/use_torchft.py --lighthouse http://127.0.0.1:29510 --replica 1
"""

import argparse
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.optim import OptimizerWrapper

from bagua.integrations.torchft import distributed_data_parallel, process_group

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--lighthouse", required=True, help="its address")
parser.add_argument(
    "--replica", type=int, required=True, help="number of this replica"
)
parser.add_argument(
    "--replicas", type=int, default=2, help="how many there are if none is lost"
)
parser.add_argument(
    "--method", choices=["ddp", "local_sgd", "diloco"], default="ddp"
)
parser.add_argument(
    "--steps",
    type=int,
    default=20,
    help="end after so many steps that all replicas took together",
)
parser.add_argument(
    "--die-after",
    type=int,
    default=-1,
    help="kill this replica in the backward pass after so many steps together",
)
options = parser.parse_args()

torch.manual_seed(0)
teacher = nn.Linear(16, 4)  # what the model is to learn
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
taken = {"together": 0}


def state_dict() -> dict:
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "taken": dict(taken),
    }


def load_state_dict(state: dict) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    taken.update(state["taken"])


# A replica of several ranks, that torchrun starts, has a store already.
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=process_group(timeout=10.0),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    use_async_quorum=options.method == "ddp",
    replica_id=f"replica_{options.replica}",
    lighthouse_addr=options.lighthouse,
    store_addr="127.0.0.1",
    store_port=store.port,
    rank=0,
    world_size=1,
    timeout=timedelta(seconds=10),
    hostname="127.0.0.1",
)


def die(_: torch.Tensor) -> None:
    if taken["together"] == options.die_after:
        os.kill(os.getpid(), signal.SIGKILL)


def take_step(trained: nn.Module, stepped: torch.optim.Optimizer) -> float:
    inputs = torch.randn(32, 16)
    stepped.zero_grad()
    loss = nn.functional.mse_loss(trained(inputs), teacher(inputs).detach())
    loss.backward()
    stepped.step()
    return loss.item()


def train(trained: nn.Module, stepped: torch.optim.Optimizer) -> None:
    while taken["together"] < options.steps:
        before = manager.current_step()
        loss = take_step(trained, stepped)
        if manager.current_step() > before:
            taken["together"] += manager.num_participants() == options.replicas
            replicas = manager.num_participants()
            line = f"step {manager.current_step():>4}  loss {loss:.4f}"
            print(f"{line}  replicas {replicas}", flush=True)


model[0].weight.register_hook(die)
torch.manual_seed(1 + options.replica)  # each replica has batches of its own
if options.method == "ddp":
    train(
        distributed_data_parallel(manager, model),
        OptimizerWrapper(manager, optimizer),
    )
elif options.method == "local_sgd":
    with LocalSGD(manager, model, optimizer, sync_every=5):
        train(model, optimizer)
else:
    outer = torch.optim.SGD(
        model.parameters(), lr=0.5, momentum=0.5, nesterov=True
    )
    with DiLoCo(manager, [model], optimizer, outer, sync_every=5):
        train(model, optimizer)

total = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"replica {options.replica} ends with {total:.6f}", flush=True)
manager.shutdown(wait=False)
