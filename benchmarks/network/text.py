"""What is trained: a small perceptron that tells the next byte of a text from those before it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bagua.cli.demo import windows
from benchmarks.network.tasks import SupervisedTrainer, text_of_this_process

__all__ = ["CONTEXT", "NextByte", "NextByteTask", "NextByteTrainer", "loss_at", "next_bytes"]

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


def next_bytes(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Windows ``[windows, CONTEXT]`` of a text, and the byte after each."""
    inputs, targets = windows(text, starts, CONTEXT)
    return inputs, targets[:, -1]


def loss_at(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    """Nats per byte."""
    inputs, targets = next_bytes(text, starts)
    return nn.functional.cross_entropy(model(inputs), targets)


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


class NextByteTrainer(SupervisedTrainer):
    """``NextByteTask`` on one rank; what nobody trains on are evenly spaced windows of other files."""

    def __init__(self, task: NextByteTask, share: int) -> None:
        self.task = task
        torch.manual_seed(task.seed)
        self.model: nn.Module = NextByte()
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=task.learning_rate, weight_decay=0.01, fused=True
        )
        super().__init__(self.model, self.optimizer, task.steps)
        self.text = text_of_this_process()
        last = len(self.text.held_out) - CONTEXT - 1
        self.held_out = next_bytes(self.text.held_out, torch.linspace(0, last, HELD_OUT_WINDOWS).long())
        self.generator = torch.Generator().manual_seed(1 + share + 1000 * task.seed)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Windows of this rank, and the byte after each."""
        starts = torch.randint(len(self.text.training) - CONTEXT, (self.task.batch,), generator=self.generator)
        return next_bytes(self.text.training, starts)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Nats per byte."""
        return nn.functional.cross_entropy(outputs, targets)
