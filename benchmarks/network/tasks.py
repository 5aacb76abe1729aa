"""What is trained: a multilayer perceptron whose time is mostly communication, and the demo's language model."""

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from bagua.cli.demo import Settings, Text, read_standard_library
from bagua.cli.demo import Trainer as DemoTrainer

__all__ = [
    "TASKS",
    "DemoTask",
    "PerceptronTask",
    "SupervisedTrainer",
    "Task",
    "Trainer",
    "rate_at",
    "text_of_this_process",
]

HELD_OUT_SEED = 1_000_000


class Trainer(Protocol):
    """One rank's model with its data; a contender replaces model and optimizer by its own.

    Attributes:
        model: what ``step`` calls; returns a loss, or what a loss is made of.
        optimizer: steps the model's parameters.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def use(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train with these from now on."""

    def step(self) -> float:
        """One training step on the next batch; returns its loss."""

    def held_out_loss(self) -> float:
        """The loss on data that nobody trains on, the same data on all ranks."""


class Task(Protocol):
    """A model, its data and its optimizer, before there is a process to hold them."""

    @property
    def title(self) -> str:
        """In a few words."""

    def trainer(self, share: int) -> Trainer:
        """The task on the rank whose share of the data this is; all ranks begin with the same weights."""


@dataclass(frozen=True)
class PerceptronTask:
    """Learn what a fixed random network makes of points near a plane of few dimensions.

    Args:
        hidden: width of the three hidden layers.
        outer: width of input and output.
        batch: rows in one rank's batch.
        learning_rate: of SGD with momentum.
        seed: of the weights; the data is the same for all seeds, the order in which it comes is not.
    """

    hidden: int = 2048
    outer: int = 1024
    batch: int = 64
    learning_rate: float = 0.1
    seed: int = 0

    @property
    def title(self) -> str:
        """In a few words."""
        widths = "-".join(str(width) for width in (self.outer, *[self.hidden] * 3, self.outer))
        return f"MLP {widths}, batch {self.batch}, SGD with momentum"

    def trainer(self, share: int) -> Trainer:
        """The task on one rank."""
        return PerceptronTrainer(self, share)


class SupervisedTrainer(ABC):
    """A model that learns targets of inputs; subclasses draw them.

    Args:
        model: model of this rank.
        optimizer: steps its parameters, at the highest learning rate.
        steps: for which the learning rate's schedule is made; None for a constant one.

    Attributes:
        held_out: inputs and targets that nobody trains on.
    """

    held_out: tuple[Tensor, Tensor]

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int | None = None) -> None:
        self.model, self.optimizer, self.steps = model, optimizer, steps
        self.schedule = self._schedule_of(optimizer)

    def _schedule_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """The learning rates of all steps."""
        steps = self.steps
        return None if steps is None else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda now: rate_at(now, steps))

    @abstractmethod
    def batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What is minimized."""

    def use(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train with these from now on."""
        self.model = model
        if optimizer is not self.optimizer:
            self.optimizer, self.schedule = optimizer, self._schedule_of(optimizer)

    def step(self) -> float:
        """One training step on the next batch; returns its loss."""
        inputs, targets = self.batch()
        loss = self.loss(self.model(inputs), targets)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return float(loss.item())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on what nobody trains on."""
        inputs, targets = self.held_out
        self.model.eval()
        loss = self.loss(self.model(inputs), targets)
        self.model.train()
        return float(loss.item())


class PerceptronTrainer(SupervisedTrainer):
    """``PerceptronTask`` on one rank."""

    latent = 8

    def __init__(self, task: PerceptronTask, share: int) -> None:
        self.task = task
        torch.manual_seed(task.seed)
        model = multilayer_perceptron(task.outer, task.hidden)
        super().__init__(model, torch.optim.SGD(model.parameters(), lr=task.learning_rate, momentum=0.9))
        fixed = torch.Generator().manual_seed(HELD_OUT_SEED)
        self.embedding = torch.randn(self.latent, task.outer, generator=fixed)
        self.teacher = torch.randn(self.latent, task.outer, generator=fixed)
        self.held_out = self.draw(fixed, 4 * task.batch)
        self.generator = torch.Generator().manual_seed(1 + share + 1000 * task.seed)

    def draw(self, generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and what the teacher makes of them, both ``[rows, outer]``."""
        points = torch.randn(rows, self.latent, generator=generator)
        scale = self.latent**-0.5
        return torch.tanh(points @ self.embedding * scale), torch.sin(points @ self.teacher * scale)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Rows of this rank."""
        return self.draw(self.generator, self.task.batch)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(outputs, targets)


def multilayer_perceptron(outer: int, hidden: int) -> nn.Module:
    """Four linear layers with ReLU between them, drawn so that signals keep their size."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((outer, hidden, hidden, hidden, outer)):
        layer = nn.Linear(before, after)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class DemoTask:
    """What ``bagua demo`` trains: bytes of Python's standard library.

    Args:
        settings: of the demo; the learning rate's schedule is made for its number of steps.
    """

    settings: Settings

    @property
    def title(self) -> str:
        """In a few words."""
        return "the demo's transformer, AdamW"

    def trainer(self, share: int) -> Trainer:
        """The task on one rank."""
        return TextTrainer(self.settings, text_of_this_process(), share)


@functools.cache
def text_of_this_process() -> Text:
    """The standard library, read once."""
    return read_standard_library()


class TextTrainer(DemoTrainer):
    """``DemoTask`` on one rank."""

    def __init__(self, settings: Settings, text: Text, share: int) -> None:
        super().__init__(settings, text.training, share)
        self.held_out_text = text.held_out

    def held_out_loss(self, text: Tensor | None = None, count: int = 512) -> float:
        """Nats per byte on windows of files that nobody trains on."""
        return super().held_out_loss(self.held_out_text if text is None else text, count)

    def use(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train with these from now on."""
        self.model = model
        if optimizer is not self.optimizer:
            self.optimizer = optimizer
            self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate_at)


def rate_at(step: int, steps: int) -> float:
    """The share of the highest learning rate: a line up in a tenth of the steps, then half a cosine to a hundredth."""
    rising = (step + 1) / (steps // 10 + 1)
    return min(rising, 0.505 + 0.495 * math.cos(math.pi * step / steps))


#: Tasks by the names of the command line; each is given the number of steps that it will be trained for.
TASKS: dict[str, Callable[[int], Task]] = {
    "mlp": lambda steps: PerceptronTask(),  # noqa: ARG005  # its learning rate is constant
    "demo": lambda steps: DemoTask(Settings(steps=max(1, steps))),
}
