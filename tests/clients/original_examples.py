"""What the examples of the original Bagua do, on synthetic data: its primitives, and a small network on images.

torchrun --nproc_per_node 2 -m tests.clients.original_examples
"""

from typing import Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import async_model_average, bytegrad, decentralized, gradient_allreduce, q_adam


def primitives() -> None:
    rank, size = bagua.get_rank(), bagua.get_world_size()
    own = torch.full((2,), rank + 1.0)
    total = size * (size + 1) / 2
    if rank == 0:
        bagua.send(own, 1)
    elif rank == 1:
        bagua.recv(received := torch.zeros(2), 0)
        assert received.tolist() == [1, 1]
    bagua.broadcast(shared := own.clone())
    assert shared.tolist() == [1, 1]
    bagua.allreduce(summed := own.clone(), op=bagua.ReduceOp.SUM)
    assert summed.tolist() == [total, total]
    bagua.reduce(at_one := own.clone(), dst=1)
    assert at_one.tolist() == ([total, total] if rank == 1 else own.tolist())
    bagua.barrier()


def images() -> torch.utils.data.TensorDataset:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(512) % 4
    prototypes = torch.randn(4, 1, 12, 12, generator=random)
    return torch.utils.data.TensorDataset(
        prototypes[labels] + 0.5 * torch.randn(512, 1, 12, 12, generator=random), labels
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(200, 32), nn.ReLU(),
        nn.Linear(32, 4),
    )  # fmt: skip


def train(name: str) -> float:
    torch.manual_seed(bagua.get_rank())
    data, model = images(), network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "qadam":
        optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=0.005, warmup_steps=8)
    algorithm = {
        "gradient_allreduce": gradient_allreduce.GradientAllReduceAlgorithm,
        "bytegrad": bytegrad.ByteGradAlgorithm,
        "decentralized": decentralized.DecentralizedAlgorithm,
        "low_precision_decentralized": decentralized.LowPrecisionDecentralizedAlgorithm,
        "async": lambda: async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=20),
        "qadam": lambda: q_adam.QAdamAlgorithm(optimizer),
    }[name]()
    model = model.with_bagua([optimizer], algorithm)
    sampler: Any = torch.utils.data.DistributedSampler(data, bagua.get_world_size(), bagua.get_rank())
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if name == "async":
        model.bagua_algorithm.abort(model)
    model.eval()
    inputs, labels = data.tensors
    with torch.no_grad():
        right = (model(inputs).argmax(1) == labels).float().mean()
    bagua.allreduce(right, op=bagua.ReduceOp.AVG)
    model.bagua_close()
    return right.item()


def main() -> None:
    bagua.init_process_group()
    primitives()
    for name in ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "async", "qadam"):
        right = train(name)
        assert right > 0.9, (name, right)
    if bagua.get_rank() == 0:
        print("primitives and 6 algorithms: right")
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()
