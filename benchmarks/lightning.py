"""A step of Lightning's Trainer through our strategy, against our wrapper in a loop by hand, and against ``ddp``.

The MLP is that of ``benchmarks.training_step``: 12.6 million parameters, SGD, one compute thread for each of two
processes. Lightning's ``ddp`` is torch's DDP on Gloo, as Lightning configures it; the strategy takes the best transport
there is, shared memory on one host, and so does our wrapper by hand.

A Trainer has its own loop, so each side runs in a thread that is given one batch at a time. Ranks meet at a barrier
between the samples. Progress bars, logs and checkpoints are off.

``python -m benchmarks.lightning`` (needs the extra ``lightning``)
"""

import argparse
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.cli.launch import Rank, run_ranks
from bagua.integrations.lightning import BaguaStrategy
from bagua.torch_api.data_parallel import DistributedDataParallel
from benchmarks.paired import Comparison, Rounds, add_arguments, compare, conclude, measure, slowest
from benchmarks.training_step import HIDDEN, OUTER, multilayer_perceptron

TIMEOUT_S = 60.0
BATCH = 16
WARM_UP_STEPS = 3
#: What is promised of a step through the strategy against each baseline.
LIMITS = {"our wrapper by hand": 1.03, "Lightning's ddp": 0.7}


class Perceptron(pl.LightningModule):  # type: ignore[misc]  # mypy does not follow Lightning
    """The MLP, as Lightning wants it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = multilayer_perceptron(hidden)

    def training_step(self, inputs: torch.Tensor, _: int) -> torch.Tensor:
        """The loss of one batch."""
        loss: torch.Tensor = self.model(inputs).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As by hand."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Batches:
    """Gives a Trainer the same batch whenever someone asks for a step."""

    def __init__(self, batch: torch.Tensor) -> None:
        self._batch = batch
        self._wanted = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._over = False

    def __len__(self) -> int:
        """More than anybody takes. Without a length Lightning would ask for a batch while it has another one."""
        return sys.maxsize

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Whoever asks for the next batch is done with the last one."""
        while True:
            self._wanted.acquire()
            if self._over:
                return
            yield self._batch
            self._done.release()

    def step(self) -> None:
        """Let the Trainer take one step."""
        self._wanted.release()
        self._done.acquire()

    def end(self) -> None:
        """No more steps."""
        self._over = True
        self._wanted.release()


class Training:
    """A training loop in a thread of its own, one step at a time.

    Args:
        loop: what trains; given the batches.
        batch: rows in a batch.
    """

    def __init__(self, loop: Callable[[Batches], object], batch: int) -> None:
        self._batches = Batches(torch.randn(batch, OUTER))
        self._thread = threading.Thread(target=loop, args=(self._batches,), daemon=True)
        self._thread.start()
        self.step = self._batches.step

    def end(self) -> None:
        """Let the loop come to its end."""
        self._batches.end()
        self._thread.join(TIMEOUT_S)


def through_trainer(strategy: str | BaguaStrategy, hidden: int, batches: Batches) -> None:
    """Lightning's loop."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Perceptron(hidden), batches)


def by_hand(hidden: int, batches: Batches) -> None:
    """The loop that everybody writes, with our wrapper."""
    module = Perceptron(hidden).model
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    model: nn.Module = DistributedDataParallel(module, optimizers=[optimizer])
    for inputs in batches:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def time_steps(rank: Rank, peer: str, hidden: int, batch: int, rounds: int) -> Rounds:
    """Steps on this rank: the baseline's, and those through the strategy."""
    os.environ["LOCAL_RANK"] = str(rank.rank)  # So that Lightning does not launch processes of its own.
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank.join(None, TIMEOUT_S)
    loops: dict[str, Callable[..., Any]] = {
        "our wrapper by hand": by_hand,
        "Lightning's ddp": functools.partial(through_trainer, "ddp"),
    }
    candidate = functools.partial(through_trainer, BaguaStrategy())
    trained = []
    for loop in (loops[peer], candidate):  # One after the other: wrapping a model is collective.
        trained.append(Training(functools.partial(loop, hidden), batch))
        for _ in range(WARM_UP_STEPS):
            trained[-1].step()
    timed = measure(trained[0].step, trained[1].step, rounds=rounds, before_each=torch.distributed.barrier)
    for training in trained:
        training.end()
    bagua.destroy_process_group()
    return timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lightning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, rounds=20)
    parser.add_argument("--hidden", type=int, default=HIDDEN, metavar="N", help="width of the hidden layers")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="N", help="rows in a batch")
    options = parser.parse_args(arguments)
    lines: list[Comparison] = []
    for peer, limit in LIMITS.items():
        of_ranks: list[Any] = run_ranks(time_steps, 2, (peer, options.hidden, options.batch, options.rounds))
        lines.append(compare(f"2 ranks, batch {options.batch}: bagua : {peer}", slowest(of_ranks), limit))
    return conclude(lines, options)


if __name__ == "__main__":
    sys.exit(main())
