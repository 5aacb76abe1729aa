"""What is trained: a small convolutional network that tells generated images apart."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.network.tasks import SupervisedTrainer

__all__ = ["ImageTask", "ImageTrainer"]

HELD_OUT_SEED = 2_000_000
SIDE = 16
CLASSES = 8
SHIFTS = 4
HELD_OUT_IMAGES = 1024


@dataclass(frozen=True)
class ImageTask:
    """Tell patterns apart that are shifted and noisy, with some labels wrong, most of a rank's from classes of its own.

    Args:
        batch: images in one rank's batch.
        ranks: over which the classes are dealt.
        steps: for which the learning rate's schedule is made.
        learning_rate: of SGD with momentum, the highest one.
        seed: of the weights, and of the order of the data; the patterns are the same for all seeds.
        own: part of a rank's images that comes from its own classes; the others come from all.
        noise: of each pixel; patterns have a standard deviation of 1.
        wrong: part of the labels that is drawn anew.
    """

    batch: int = 16
    ranks: int = 4
    steps: int = 1500
    learning_rate: float = 0.1
    seed: int = 0
    own: float = 0.8
    noise: float = 1.5
    wrong: float = 0.1

    @property
    def title(self) -> str:
        """In a few words."""
        return f"a convolutional network on {SIDE} x {SIDE} pixels, {CLASSES} classes, SGD with momentum"

    def trainer(self, share: int) -> "ImageTrainer":
        """The task on one rank."""
        return ImageTrainer(self, share)


class ImageTrainer(SupervisedTrainer):
    """``ImageTask`` on one rank."""

    def __init__(self, task: ImageTask, share: int) -> None:
        self.task = task
        torch.manual_seed(task.seed)
        model = convolutional_network()
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=0.9), task.steps)
        fixed = torch.Generator().manual_seed(HELD_OUT_SEED)
        coarse = torch.randn(CLASSES, 1, SIDE // 4, SIDE // 4, generator=fixed)
        patterns = nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")
        patterns /= patterns.std(dim=(1, 2, 3), keepdim=True)
        shifts = [(down, right) for down in range(SHIFTS) for right in range(SHIFTS)]
        self.patterns = torch.stack([patterns.roll(shift, (2, 3)) for shift in shifts])
        self.held_out = self.draw(fixed, HELD_OUT_IMAGES, torch.arange(CLASSES))
        mine = torch.arange(CLASSES)[share * CLASSES // task.ranks : (share + 1) * CLASSES // task.ranks]
        self.mine = mine if len(mine) else torch.arange(CLASSES)
        self.generator = torch.Generator().manual_seed(1 + share + 1000 * task.seed)

    def draw(self, generator: torch.Generator, count: int, own: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[count, 1, SIDE, SIDE]`` and their labels, most of the classes ``own``."""
        classes = torch.randint(CLASSES, (count,), generator=generator)
        chosen = own[torch.randint(len(own), (count,), generator=generator)]
        classes = torch.where(torch.rand(count, generator=generator) < self.task.own, chosen, classes)
        images = self.patterns[torch.randint(len(self.patterns), (count,), generator=generator), classes]
        images = images + self.task.noise * torch.randn(images.shape, generator=generator)
        drawn = torch.randint(CLASSES, (count,), generator=generator)
        return images, torch.where(torch.rand(count, generator=generator) < self.task.wrong, drawn, classes)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Images of this rank."""
        return self.draw(self.generator, self.task.batch, self.mine)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The cross entropy."""
        return nn.functional.cross_entropy(outputs, targets)


def convolutional_network() -> nn.Module:
    """Two convolutions and a linear layer: 9,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 4) ** 2, CLASSES),
    )
