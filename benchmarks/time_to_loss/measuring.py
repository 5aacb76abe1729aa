"""What is measured of a contender: losses by steps, times of steps, a whole training on a link, and memory."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed
from torch import nn

from bagua import comm
from bagua.cli.demo import ByteTransformer, Settings
from bagua.cli.lab.network import open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.link import parse_link
from benchmarks.network.contenders import find_maker, read_options
from benchmarks.network.ranks import Curve, Place, Sample, Training, train_and_look
from benchmarks.network.tasks import DemoTask, PerceptronTask, TextTrainer
from benchmarks.time_to_loss.peers import expand

__all__ = ["SHAPE", "Trained", "losses", "memory", "paces", "whole"]

#: 4.8 million parameters: on a core of 2026 a step takes about as long as its exchange at 1 Gbit/s.
SHAPE = "width=256,depth=6,heads=4,context=64"
BATCH_PER_RANK = 2
HELD_OUT_WINDOWS = 96
#: Between two looks at the held-out loss.
LOOK_EVERY = 25
WARM_UP_STEPS = 6
LEAST_ROUNDS = 3
#: Of the memory's task: 50 million parameters.
MEMORY_TASK = PerceptronTask(hidden=4096, outer=2048, batch=16)
MEMORY_STEPS = 4


@dataclass(frozen=True)
class Trained:
    """One training.

    Args:
        contender: who trains, as on the command line.
        steps: how many; the learning rate's schedule is made for them.
        lr: highest learning rate of AdamW; those of other optimizers are made from it.
        seed: of weights and data.
        shape: options of the transformer.
    """

    contender: str
    steps: int
    lr: float
    seed: int
    shape: str = SHAPE

    @property
    def task(self) -> DemoTask:
        """What is trained."""
        settings = Settings(
            steps=self.steps,
            batch_per_rank=BATCH_PER_RANK,
            learning_rate=self.lr,
            seed=1000 * self.seed,  # Ranks have the seeds that follow.
            shape=cast("dict[str, int]", read_options(self.shape)),
        )
        return DemoTask(settings)

    @property
    def stops(self) -> list[int]:
        """Numbers of steps after which to look."""
        return [*range(LOOK_EVERY, self.steps, LOOK_EVERY), self.steps]


class MeanTraining(Training):
    """Training that is judged by the mean of all ranks' weights: what a user would save.

    To look changes nothing of what is trained.
    """

    def held_out_loss(self) -> float:
        """Of the mean weights; each rank reads its share of what is held out."""
        size, trainer = torch.distributed.get_world_size(), self.trainer
        assert isinstance(trainer, TextTrainer)
        ours = next(module for module in trainer.model.modules() if isinstance(module, ByteTransformer))
        probe = ByteTransformer(**trainer.settings.shape)
        flat = nn.utils.parameters_to_vector(ours.parameters()).detach().clone()
        torch.distributed.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / size, probe.parameters())
        text = trainer.held_out_text
        share = len(text) // size
        part = text[torch.distributed.get_rank() * share :][:share]
        trained, trainer.model = trainer.model, probe
        loss = torch.tensor(trainer.held_out_loss(part, HELD_OUT_WINDOWS // size), dtype=torch.float64)
        trainer.model = trained
        torch.distributed.all_reduce(loss)
        return float(loss) / size


def join(rank: Rank, place: Place | None) -> None:
    """Take part on a host of the lab, or on this machine as if on a host of its own."""
    rank = rank if place is not None else replace(rank, local_world_size=1)
    rank.join("gloo", 300.0)


def train(rank: Rank, place: Place | None, trained: Trained) -> Curve:
    """Train, and look at the loss now and then."""
    join(rank, place)
    training = MeanTraining(trained.task, expand(trained.contender), rank.rank)
    curve = train_and_look(training, trained.stops)
    training.prepared.finish()
    comm.destroy_process_group()
    return curve


def losses(trained: Trained, hosts: int) -> dict[str, Any]:
    """The held-out loss by steps, without any limit to the links."""
    curve = run_ranks(train, hosts, (None, trained))[0]
    return {"held_out": {str(stop): loss for stop, loss in curve.held_out.items()}}


def whole(trained: Trained, hosts: int, link: str) -> dict[str, Any]:
    """The held-out loss by steps, and the seconds that they took on a link."""
    with open_network(hosts, parse_link(link)) as network:
        curve = run_ranks(train, hosts, (Place(network), trained), network=network)[0]
    return {
        "held_out": {str(stop): loss for stop, loss in curve.held_out.items()},
        "seconds": {str(stop): seconds for stop, seconds in curve.seconds.items()},
    }


def time_steps(
    rank: Rank, place: Place, trained: Trained, period: int, budget_s: float
) -> tuple[list[float], list[float]]:
    """Seconds of a step, and bytes that this host sent for it, in rounds of whole periods until time is over."""
    join(rank, place)
    training = Training(trained.task, expand(trained.contender), rank.rank)
    training.take_steps(-(-WARM_UP_STEPS // period) * period)
    training.prepared.pause()
    begun, samples = time.monotonic(), list[Sample]()
    while len(samples) < LEAST_ROUNDS or not over(time.monotonic() - begun > budget_s):
        samples.append(training.turn(rank, place, period))
    training.prepared.finish()
    comm.destroy_process_group()
    return [one.step_s for one in samples], [one.sent_bytes for one in samples]


def over(here: bool) -> bool:
    """Whether it is over for some rank."""
    word = torch.tensor(float(here))
    torch.distributed.all_reduce(word, op=torch.distributed.ReduceOp.MAX)
    return bool(word)


def paces(trained: Trained, hosts: int, link: str, period: int, budget_s: float) -> dict[str, Any]:
    """Mean seconds of a step on a link, round by round, of the slowest rank; and bytes of one host."""
    with open_network(hosts, parse_link(link)) as network:
        arguments = (Place(network), trained, period, budget_s)
        of_ranks = run_ranks(time_steps, hosts, arguments, network=network)
    sent = [statistics.median(bytes_of_rounds) for _, bytes_of_rounds in of_ranks]
    rounds = [max(of_round) for of_round in zip(*(seconds for seconds, _ in of_ranks), strict=True)]
    return {"step_s": rounds, "sent_bytes": statistics.mean(sent), "shortcoming": network.shortcoming}


def fill(rank: Rank, contender: str, task: PerceptronTask, steps: int) -> tuple[int, int]:
    """The most memory that this process has had, and that of one copy of the weights, in bytes."""
    join(rank, None)
    trainer = task.trainer(rank.rank)
    prepared = find_maker(expand(contender))(
        trainer.model, torch.optim.Adam(trainer.model.parameters(), lr=1e-4, fused=True)
    )
    trainer.use(prepared.model, prepared.optimizer)
    copy_bytes = sum(4 * parameter.numel() for parameter in trainer.model.parameters())
    prepared.resume()
    for _ in range(steps):
        trainer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Earlier than the pause, in which weights are averaged.
    prepared.pause()
    prepared.finish()
    comm.destroy_process_group()
    return 1024 * peak, copy_bytes


def memory(contender: str, hosts: int, period: int, task: PerceptronTask = MEMORY_TASK) -> dict[str, Any]:
    """Peak resident memory of a rank, in copies of the weights; the least of all ranks, as chance only adds to it."""
    of_ranks: Sequence[tuple[int, int]] = run_ranks(fill, hosts, (contender, task, max(MEMORY_STEPS, 2 * period + 1)))
    return {"copies": min(peak for peak, _ in of_ranks) / of_ranks[0][1]}
