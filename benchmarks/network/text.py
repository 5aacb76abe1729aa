"""What is trained: a small perceptron that tells the next byte of a text from those before it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bagua.cli.demo.text import windows
from benchmarks.network.tasks import rate_at, text_of_this_process

__all__ = ["CONTEXT", "NextByte", "NextByteTask", "NextByteTrainer", "loss_at"]

CONTEXT, WIDTH, HIDDEN = 8, 8, 48
HELD_OUT_WINDOWS = 8192


class NextByte(nn.Module):
    """Logits of the next byte, from those before it: 20,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 256)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits ``[batch, 256]`` for inputs ``[batch, CONTEXT]``."""
        logits: Tensor = self.layers(self.embedding(inputs).flatten(1))
        return logits


def loss_at(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    """Nats per byte."""
    inputs, targets = windows(text, starts, CONTEXT)
    return nn.functional.cross_entropy(model(inputs), targets[:, -1])


@dataclass(frozen=True)
class NextByteTask:
    """Tell the next byte of Python's standard library; in 1,500 steps four ranks see 75 of them for each parameter.

    Args:
        steps: for which the learning rate's schedule is made.
        seed: of the weights and of the choice of windows.
        batch: windows in one rank's batch.
        learning_rate: of AdamW, the highest one.
    """

    steps: int = 1500
    seed: int = 0
    batch: int = 256
    learning_rate: float = 4.5e-2

    @property
    def title(self) -> str:
        """In a few words."""
        return f"the next of {CONTEXT} bytes of Python's standard library, a perceptron, AdamW"

    def trainer(self, share: int) -> "NextByteTrainer":
        """The task on one rank."""
        return NextByteTrainer(self, share)


class NextByteTrainer:
    """``NextByteTask`` on one rank."""

    def __init__(self, task: NextByteTask, share: int) -> None:
        self.task = task
        torch.manual_seed(task.seed)
        self.model: nn.Module = NextByte()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, weight_decay=0.01, fused=True
        )
        self.text = text_of_this_process()
        self.generator = torch.Generator().manual_seed(1 + share + 1000 * task.seed)
        self.schedule = self.schedule_of(self.optimizer)

    def schedule_of(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """The learning rates of all steps."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, self.task.steps))

    def use(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train with these from now on."""
        self.model = model
        if optimizer is not self.optimizer:
            self.optimizer, self.schedule = optimizer, self.schedule_of(optimizer)

    def step(self) -> float:
        """One training step on the next batch; returns its loss."""
        starts = torch.randint(len(self.text.training) - CONTEXT, (self.task.batch,), generator=self.generator)
        loss = loss_at(self.model, self.text.training, starts)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        return float(loss.item())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Nats per byte on evenly spaced windows of files that nobody trains on."""
        held_out = self.text.held_out
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
        self.model.eval()
        loss = loss_at(self.model, held_out, starts)
        self.model.train()
        return float(loss.item())
