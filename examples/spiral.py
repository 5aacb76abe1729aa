"""Tell points of three spirals apart, on any number of processes.

baguarun --nproc 2 examples/spiral.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua

BATCH, EPOCHS, LEARNING_RATE = 64, 20, 0.1


def spirals(count: int, seed: int) -> TensorDataset:
    """Points of three arms, with some noise, and the number of the arm."""
    random = torch.Generator().manual_seed(seed)
    arm = torch.randint(3, (count,), generator=random)
    radius = torch.rand(count, generator=random)
    angle = 6 * radius + arm * (2 * torch.pi / 3)
    angle += 0.2 * torch.randn(count, generator=random)
    points = torch.stack([angle.cos(), angle.sin()], dim=1)
    return TensorDataset(points * radius[:, None], arm)


bagua.init_process_group()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
model = bagua.with_bagua(model, optimizer, "gradient_allreduce")

train_data = spirals(4096, seed=1)
loader = DataLoader(train_data, batch_size=BATCH, shuffle=True)
loader = bagua.distributed_loader(loader, split_batches=True)

for _ in range(EPOCHS):
    for points, arms in loader:
        loss = nn.functional.cross_entropy(model(points), arms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

points, arms = spirals(4096, seed=2).tensors
accuracy = (model(points).argmax(1) == arms).float().mean().item()
bagua.print_rank_0(f"accuracy {accuracy:.3f}")

bagua.destroy_process_group()
