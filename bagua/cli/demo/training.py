"""What every process of the demo does: measure one process alone, train together, evaluate."""

import dataclasses
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import bagua.torch_api as bagua
from bagua import comm
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithmImpl, registry
from bagua.cli.demo.model import ByteTransformer, Shape
from bagua.cli.demo.text import Text, batch, read_standard_library, windows
from bagua.cli.launch import Rank
from bagua.parallel import BaguaModule, DecentralizedDataParallel

#: Not an algorithm of the engine but a wrapper of its own, under a name like theirs.
DECENTRALIZED = "decentralized_data_parallel"

WARM_UP_STEPS = 3  # of a measurement, not counted
SOLO_STEPS = 12  # measured before training and once more after it
LAST_STEPS = 20  # whose mean is the final training loss
HELD_OUT_BATCHES = 32
SYNC_INTERVAL_MS = 25  # about a step of two processes on a laptop


@dataclass(frozen=True)
class Settings:
    """What the demo is asked to do.

    Args:
        algorithm: a name in the registry of algorithms, or ``decentralized_data_parallel``.
        options: options of the algorithm.
        backend: as for ``init_process_group``.
        device: ``cpu`` or ``cuda``.
        steps: optimizer steps.
        batch_per_rank: windows of text in one rank's batch.
        learning_rate: the highest one, reached after a tenth of the steps.
        seed: seed of the weights and of the choice of windows.
        timeout_s: longest wait for another process in one call.
        clip_norm: the largest norm of the gradients; 0 does not clip.
        shape: shape of the model.
    """

    algorithm: str = "gradient_allreduce"
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    backend: str | None = None
    device: str = "cpu"
    steps: int = 400
    batch_per_rank: int = 8
    learning_rate: float = 2e-3
    seed: int = 0
    timeout_s: float = 60.0
    clip_norm: float = 0.0
    shape: Shape = dataclasses.field(default_factory=Shape)


@dataclass(frozen=True)
class Phase:
    """Rank 0 begins something; reported while it runs."""

    name: str


@dataclass(frozen=True)
class TrainingProgress:
    """Rank 0 has finished a step; reported while it runs.

    Args:
        step: how many steps are done.
        loss: rank 0's loss in this step, nats per byte.
        tokens_per_s: tokens that all ranks read in a second, in this step.
        sent_bytes: bytes that rank 0 sent in this step.
        exposed: part of this step in which rank 0 stood still for communication, waiting for others included.
    """

    step: int
    loss: float
    tokens_per_s: float
    sent_bytes: int
    exposed: float


@dataclass(frozen=True)
class Result:
    """What a rank knows at the end.

    Args:
        backend: name of the backend that the ranks communicated through.
        parameters: how many numbers the model holds.
        files: how many files the text came from.
        losses: this rank's training loss, nats per byte, step by step.
        first_loss: the first step's training loss, mean over ranks.
        last_loss: the mean of the last steps' training loss over ranks.
        held_out_loss: on files that were not trained on.
        tokens_per_s: all ranks together, from the median step.
        solo_tokens_per_s: one process alone, without bagua, from the median step.
        sent_bytes_per_step: bytes that rank 0 sent in a step, mean over steps.
        disagreement: the largest difference between a parameter here and on rank 0, over all ranks.
    """

    backend: str
    parameters: int
    files: int
    losses: list[float]
    first_loss: float
    last_loss: float
    held_out_loss: float
    tokens_per_s: float
    solo_tokens_per_s: float
    sent_bytes_per_step: float
    disagreement: float


class Trainer:
    """A model with its optimizer, its learning rates and its share of the text.

    Args:
        settings: see there.
        text: uint8, shape ``[n]``.
        share: ranks with different numbers draw different windows.
    """

    def __init__(self, settings: Settings, text: Tensor, share: int) -> None:
        self.settings = settings
        self.text = text
        self.device = torch.device("cuda", share) if settings.device == "cuda" else torch.device("cpu")
        self.generator = torch.Generator().manual_seed(settings.seed + 1 + share)
        torch.manual_seed(settings.seed)
        self.model: torch.nn.Module = ByteTransformer(settings.shape).to(self.device)
        self.optimizer = self.make_optimizer()
        self.schedule = self.make_schedule(self.optimizer)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW, unless the algorithm needs another."""
        if self.settings.algorithm in registry:
            kind = registry.get(self.settings.algorithm).optimizer_class
            if kind is not None:
                return kind(self.model.parameters(), lr=self.settings.learning_rate)
        return self.adamw(self.model.parameters())

    def adamw(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        return torch.optim.AdamW(parameters, lr=self.settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rates of an optimizer."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_at)

    def distribute(self) -> None:
        """From now on, train together with the other ranks. Collective."""
        bagua.with_bagua(self.model, self.optimizer, Algorithm.init(self.settings.algorithm, **self.settings.options))

    def finish(self) -> None:
        """Training is over. Collective."""

    def evaluating(self) -> AbstractContextManager[object]:
        """What surrounds an evaluation. Collective."""
        return nullcontext()

    def learning_rate_at(self, step: int) -> float:
        """The share of the highest learning rate: a line up, then half a cosine down to a tenth."""
        rising = (step + 1) / (self.settings.steps // 10 + 1)
        falling = 0.55 + 0.45 * math.cos(math.pi * step / self.settings.steps)
        return min(rising, falling)

    def loss(self) -> Tensor:
        """Of the next batch."""
        inputs, targets = batch(self.text, self.settings.batch_per_rank, self.settings.shape.context, self.generator)
        loss: Tensor = self.model(inputs.to(self.device), targets.to(self.device))
        return loss

    def step(self) -> float:
        """Train on one batch; returns its loss."""
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.schedule.step()
        return float(loss.item())

    def step_seconds(self, steps: int) -> list[float]:
        """Take a few steps and time each one."""
        seconds = []
        for _ in range(WARM_UP_STEPS + steps):
            start_s = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start_s)
        return seconds[WARM_UP_STEPS:]


class DecentralizedTrainer(Trainer):
    """The same with ``DecentralizedDataParallel``, with its own optimizers; evaluated is the mean of all ranks."""

    def distribute(self) -> None:
        """From now on, train together with the other ranks. Collective."""
        self.model = DecentralizedDataParallel(
            self.model,
            optim_fn=lambda named: self.adamw([parameter for _, parameter in named]),
            lr_scheduler_fn=self.make_schedule,
            topology="one-peer-exp",
        )

    def evaluating(self) -> AbstractContextManager[object]:
        """The mean of all ranks, for the length of a block. Collective."""
        assert isinstance(self.model, DecentralizedDataParallel)
        return self.model.global_avg()

    def step(self) -> float:
        """Train on one batch; the backward pass steps each bucket."""
        loss = self.loss()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.item())


class AsynchronousTrainer(Trainer):
    """The same with weights averaged in the background, after a tenth of the steps; evaluated is their mean."""

    def distribute(self) -> None:
        """From now on, train together with the other ranks. Collective."""
        settings = self.settings
        algorithm = Algorithm.init(
            settings.algorithm, sync_interval_ms=SYNC_INTERVAL_MS, warmup_steps=settings.steps // 10
        )
        self.model.with_bagua([self.optimizer], algorithm)  # type: ignore[operator]  # the import put it on all modules

    def finish(self) -> None:
        """Wait for the last average, which all ranks have in common. Collective."""
        assert isinstance(self.model, BaguaModule)
        assert isinstance(self.model.bagua_algorithm, AsyncModelAverageAlgorithmImpl)
        self.model.bagua_algorithm.abort(self.model)


def trainer_class(algorithm: str) -> type[Trainer]:
    """What trains with the algorithm of that name."""
    if algorithm == DECENTRALIZED:
        return DecentralizedTrainer
    return AsynchronousTrainer if registry.get(algorithm)().in_background else Trainer


def train(rank: Rank, settings: Settings) -> Result:
    """Run the demo on one of its processes.

    Args:
        rank: this process, as the launcher started it.
        settings: the same on all ranks.

    Returns:
        The losses of this rank, and for the rest the same on all ranks.

    Raises:
        BaguaError: an option that bagua refuses, or another rank that is gone.
    """
    if settings.device == "cuda":
        torch.cuda.set_device(rank.rank)
    rank.join(settings.backend, settings.timeout_s)
    text = read_standard_library()

    solo = Trainer(settings, text.training, rank.rank)
    solo_seconds = measure_alone(rank, solo)
    trainer = trainer_class(settings.algorithm)(settings, text.training, rank.rank)
    trainer.distribute()
    steps = train_together(rank, trainer)
    trainer.finish()
    solo_seconds += measure_alone(rank, solo)

    result = evaluate(rank, trainer, text, steps, solo_seconds)
    bagua.destroy_process_group()
    return result


def measure_alone(rank: Rank, trainer: Trainer) -> list[float]:
    """Time steps of a plain model on rank 0 while all other ranks wait."""
    seconds = []
    if rank.rank == 0:
        rank.report(Phase("one process alone"))
        seconds = trainer.step_seconds(SOLO_STEPS)
    bagua.barrier()
    return seconds


class TrainedSteps(NamedTuple):
    """The steps of a training: each one's loss and seconds, and the bytes that this rank sent in all of them."""

    losses: list[float]
    seconds: list[float]
    sent_bytes: int


def train_together(rank: Rank, trainer: Trainer) -> TrainedSteps:
    """The training itself."""
    settings = trainer.settings
    tokens = rank.world_size * settings.batch_per_rank * settings.shape.context
    losses: list[float] = []
    seconds: list[float] = []
    first_bytes = sent = all_sent_bytes()
    stood = standing_s()
    if rank.rank == 0:
        rank.report(Phase("training"))
    for step in range(1, settings.steps + 1):
        start_s = time.perf_counter()
        losses.append(trainer.step())
        seconds.append(time.perf_counter() - start_s)
        before, sent = sent, all_sent_bytes()
        stood_before, stood = stood, standing_s()
        if rank.rank == 0:
            exposed = (stood - stood_before) / seconds[-1]
            rank.report(TrainingProgress(step, losses[-1], tokens / seconds[-1], sent - before, exposed))
    return TrainedSteps(losses, seconds, sent - first_bytes)


def all_sent_bytes() -> int:
    """Bytes that this process has sent so far."""
    return sum(entry.sent_bytes for entry in comm.stats().values())


def standing_s() -> float:
    """Seconds that this process has waited for communication so far."""
    now = bagua.metrics()
    return now["comm/time_exposed"] + now["comm/time_waiting"]


def evaluate(
    rank: Rank, trainer: Trainer, text: Text, steps: TrainedSteps, solo_seconds: Sequence[float] = ()
) -> Result:
    """Put the numbers of all ranks together."""
    settings = trainer.settings
    if rank.rank == 0:
        rank.report(Phase("held-out files"))
    last = steps.losses[-LAST_STEPS:]
    with trainer.evaluating():
        on_held_out = held_out_loss(trainer, text.held_out)
    own = torch.tensor([steps.losses[0], sum(last) / len(last), on_held_out])
    mean = own.to(trainer.device)
    bagua.allreduce(mean, op=comm.ReduceOp.SUM)
    first_loss, last_loss, loss_on_held_out = (mean / rank.world_size).tolist()
    tokens = settings.batch_per_rank * settings.shape.context
    return Result(
        backend=comm.get_default_group().global_communicator.backend,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        files=text.files,
        losses=steps.losses,
        first_loss=first_loss,
        last_loss=last_loss,
        held_out_loss=loss_on_held_out,
        tokens_per_s=rank.world_size * tokens / statistics.median(steps.seconds),
        solo_tokens_per_s=tokens / statistics.median(solo_seconds) if solo_seconds else 0.0,
        sent_bytes_per_step=steps.sent_bytes / settings.steps,
        disagreement=disagreement(trainer),
    )


@torch.no_grad()
def held_out_loss(trainer: Trainer, text: Tensor) -> float:
    """This rank's loss on evenly spaced windows of the held-out text, the same windows for every seed."""
    settings = trainer.settings
    last_start = len(text) - settings.shape.context - 1
    starts = torch.linspace(0, last_start, HELD_OUT_BATCHES * settings.batch_per_rank).long()
    trainer.model.eval()
    losses = []
    for part in torch.split(starts, settings.batch_per_rank):
        inputs, targets = windows(text, part, settings.shape.context)
        losses.append(float(trainer.model(inputs.to(trainer.device), targets.to(trainer.device)).item()))
    trainer.model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def disagreement(trainer: Trainer) -> float:
    """The largest difference between a parameter of any rank and the same parameter of rank 0."""
    own = torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])
    of_rank_0 = own.clone()
    bagua.broadcast(of_rank_0, 0)
    largest = (own - of_rank_0).abs().max()
    bagua.allreduce(largest, op=comm.ReduceOp.MAX)
    return float(largest.item())
