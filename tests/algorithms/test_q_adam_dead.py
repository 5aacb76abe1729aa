"""QAdam where inputs and units are dead in the warm-up and wake up after it: it stays near Adam."""

from __future__ import annotations

import torch
from torch import nn

import bagua.comm
from bagua.optim import QAdamOptimizer
from bagua.parallel import with_bagua
from tests.harness import seeded

RANKS, CLASSES, SIDE = 2, 10, 8
WARMUP, STEPS, LR = 40, 160, 1e-3


def digits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of ten shapes with a border that is black, and labels of which some are wrong."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.rand(CLASSES, 1, SIDE - 2, SIDE - 2, generator=generator)
    shapes = nn.functional.pad(inner * (inner > 0.55), (1, 1, 1, 1))
    labels = torch.randint(0, CLASSES, (3000,), generator=generator)
    pictures = shapes[labels]
    pictures = (pictures + 0.25 * torch.randn(pictures.shape, generator=generator) * (pictures > 0)).clamp(0)
    wrong = torch.rand(len(labels), generator=generator) < 0.25
    return pictures, torch.where(wrong, torch.randint(0, CLASSES, labels.shape, generator=generator), labels)


def light_up(pictures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Give the border, which was constant until now, something to show."""
    pictures = pictures.clone()
    pictures[:, :, 0, :] = torch.rand(pictures[:, :, 0, :].shape, generator=generator)
    pictures[:, :, :, 0] = torch.rand(pictures[:, :, :, 0].shape, generator=generator)
    return pictures


def convolutional(seed: int) -> nn.Module:
    with seeded(seed):
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(),
            nn.Conv2d(6, 12, 3, padding=1, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Linear(32, CLASSES),
        )  # fmt: skip


def final_loss(seed: int, algorithm: str) -> tuple[float, float]:
    """The loss over all data, and the largest weight of the training."""
    rank = bagua.comm.get_rank()
    pictures, labels = digits(seed)
    own = labels % RANKS == rank
    model = convolutional(seed)
    if algorithm == "qadam":
        optimizer: torch.optim.Optimizer = QAdamOptimizer(model.parameters(), lr=LR, warmup_steps=WARMUP)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    with_bagua(model, [optimizer], algorithm)
    generator = torch.Generator().manual_seed(10 * seed + rank)
    largest = 0.0
    for step in range(STEPS):
        chosen = torch.randint(0, int(own.sum()), (16,), generator=generator)
        inputs = pictures[own][chosen]
        if step >= WARMUP:
            inputs = light_up(inputs, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels[own][chosen]).backward()
        optimizer.step()
        largest = max(largest, *(parameter.detach().abs().max().item() for parameter in model.parameters()))
    with torch.no_grad():
        everything = light_up(pictures, torch.Generator().manual_seed(seed))
        return nn.functional.cross_entropy(model(everything), labels).item(), largest


def test_it_stays_near_adam(thread_ranks):
    """Without an estimate for the elements that wake up, weights reach 1e10 and the loss doubles, or is NaN."""
    of_adam, _ = thread_ranks(RANKS, final_loss, 0, "gradient_allreduce")[0]
    of_qadam, largest = thread_ranks(RANKS, final_loss, 0, "qadam")[0]
    assert of_adam < 1.8, "there is something to learn"
    assert largest < 20
    assert of_qadam <= 1.05 * of_adam, f"{of_qadam} against {of_adam}"
