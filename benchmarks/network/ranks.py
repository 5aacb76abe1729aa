"""What the rank processes do: take their place on a host, train, time, count bytes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed

from bagua import comm
from bagua.cli.lab.network import Network, sent_bytes
from bagua.cli.launch import Rank
from bagua.errors import ConfigurationError
from bagua.link import LinkSettings
from benchmarks.network.contenders import Prepared, find_maker
from benchmarks.network.tasks import Task, Trainer

__all__ = ["Curve", "Order", "Place", "Progress", "Sample", "Timed", "Training", "time_contenders", "train_contenders"]

TIMEOUT_S = 300.0
WARM_UP_STEPS = 5  # buckets form in the first; torch's PowerSGD hook begins at the fourth


@dataclass(frozen=True)
class Place:
    """Where the ranks live.

    Args:
        network: the hosts.
        ranks_per_host: consecutive ranks share a host.
        backend: of bagua; None is its own choice.
        keeps_rate: the links have the rate with which the network was opened, as a switch with delay has it.
    """

    network: Network
    ranks_per_host: int = 1
    backend: str | None = None
    keeps_rate: bool = False

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.network.hosts) * self.ranks_per_host

    def join(self, rank: Rank) -> None:
        """Initialize bagua's process group on this process, which the launcher has put on its host."""
        rank.join(self.backend, TIMEOUT_S)

    def sent_bytes(self, rank: Rank) -> int:
        """What this rank's host has sent so far, told by one rank of the host; 0 from the others."""
        return sent_bytes() if rank.rank % self.ranks_per_host == 0 else 0


@dataclass(frozen=True)
class Progress:
    """Rank 0 has done something; reported while it runs.

    Args:
        text: what.
    """

    text: str


@dataclass(frozen=True)
class Sample:
    """One turn of one contender, as one rank saw it.

    Args:
        step_s: mean seconds of a step.
        sent_bytes: by this rank's host in one step, on an average over the turn; 0 from ranks that do not count.
    """

    step_s: float
    sent_bytes: float


@dataclass(frozen=True)
class Timed:
    """All turns of all contenders, as one rank saw them.

    Args:
        samples: by rate, then by contender in the given order, then by round.
        refusals: why those that are missing cannot run here, by contender.
    """

    samples: list[list[list[Sample]]]
    refusals: dict[str, str]


@dataclass(frozen=True)
class Curve:
    """How training went, as one rank saw it.

    Args:
        held_out: loss on held-out data by number of steps; mean over ranks.
        training: this rank's training loss, step by step.
        seconds: since the start, at each entry of ``held_out``; evaluation not counted.
    """

    held_out: dict[int, float] = field(default_factory=dict)
    training: list[float] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Order:
    """To train one contender from the beginning, and to look at the held-out loss at some steps.

    Args:
        contender: who.
        rate: of the links, in Mbit/s; None is unlimited.
        stops: numbers of steps after which to look; rising.
    """

    contender: str
    rate: float | None
    stops: tuple[int, ...]


class Training:
    """One contender's model on this rank.

    Args:
        task: what is trained.
        contender: who trains it.
        share: this rank's number.
    """

    def __init__(self, task: Task, contender: str, share: int) -> None:
        self.contender = contender
        self.trainer: Trainer = task.trainer(share)
        self.prepared: Prepared = find_maker(contender)(self.trainer.model, self.trainer.optimizer)
        self.trainer.use(self.prepared.model, self.prepared.optimizer)

    def take_steps(self, steps: int) -> list[float]:
        """So many steps in a row; returns their losses."""
        return [self.trainer.step() for _ in range(steps)]

    def turn(self, rank: Rank, place: Place, calls: int) -> Sample:
        """As many steps that are not timed as steps that are, with the network to itself.

        A contender that exchanges every ``calls`` steps is so timed from the end of one exchange to the end of the
        next: the time holds all steps of a period, and the waiting at its end. What other contenders left of the
        caches, and what an exchange costs that begins after a pause, is over by then.
        """
        torch.distributed.barrier()
        before = place.sent_bytes(rank)
        self.prepared.resume()
        self.take_steps(calls)
        start_s = time.perf_counter()
        self.take_steps(calls)
        step_s = (time.perf_counter() - start_s) / calls
        self.prepared.pause()
        torch.distributed.barrier()
        return Sample(step_s, (place.sent_bytes(rank) - before) / (2 * calls))

    def held_out_loss(self) -> float:
        """Of all ranks' models, the mean. Training has to be resumed after it."""
        self.prepared.pause()
        loss = torch.tensor(self.trainer.held_out_loss(), dtype=torch.float64)
        torch.distributed.all_reduce(loss)
        return float(loss) / torch.distributed.get_world_size()


def time_contenders(
    rank: Rank,
    place: Place,
    task: Task,
    contenders: Sequence[str],
    rates: Sequence[float | None],
    rounds: int,
    calls: int,
) -> Timed:
    """Steps of all contenders in turn, in an order that rotates from round to round.

    Args:
        rank: which one this is.
        place: where it lives.
        task: what is trained.
        contenders: who takes part; one that is named twice has one model and two turns.
        rates: of the links, in Mbit/s; None is unlimited.
        rounds: turns of each contender at each rate.
        calls: timed steps in a turn; for those that do not exchange in each step, a multiple of their period.

    Returns:
        The samples, without those of contenders that cannot run with these ranks.
    """
    place.join(rank)
    # Rounded up, so that turns begin where periods of so many steps do.
    trainings, refusals = warm_up(rank, task, contenders, -(-WARM_UP_STEPS // calls) * calls)
    present = [trainings[contender] for contender in contenders if contender in trainings]
    by_rate = []
    for rate in rates:
        limit_together(rank, place, rate)
        samples: list[list[Sample]] = [[] for _ in present]
        for number in range(rounds):
            for position in range(len(present)):
                chosen = (number + position) % len(present)
                samples[chosen].append(present[chosen].turn(rank, place, calls))
            report(rank, f"round {number + 1} of {rounds}")
        by_rate.append(samples)
    comm.destroy_process_group()
    return Timed(by_rate, refusals)


def warm_up(
    rank: Rank, task: Task, contenders: Sequence[str], steps: int = WARM_UP_STEPS
) -> tuple[dict[str, Training], dict[str, str]]:
    """Prepare each contender once, and let it take its first ``steps``; also why some cannot."""
    trainings: dict[str, Training] = {}
    refusals: dict[str, str] = {}
    for contender in dict.fromkeys(contenders):
        try:
            training = Training(task, contender, rank.rank)
        except ConfigurationError as error:  # which every rank finds alike
            refusals[contender] = str(error)
            continue
        training.take_steps(steps)
        training.prepared.pause()
        trainings[contender] = training
        report(rank, f"{contender} is ready")
    return trainings, refusals


def train_contenders(rank: Rank, place: Place, task: Task, orders: Sequence[Order]) -> list[Curve]:
    """Carry out one order after the other."""
    place.join(rank)
    curves = []
    for order in orders:
        limit_together(rank, place, order.rate)
        report(rank, f"training with {order.contender}")
        curves.append(train_and_look(Training(task, order.contender, rank.rank), order.stops))
    comm.destroy_process_group()
    return curves


def train_and_look(training: Training, stops: Sequence[int]) -> Curve:
    """Train in pieces, and look at the held-out loss after each."""
    curve = Curve()
    seconds, done = 0.0, 0
    for stop in stops:
        start_s = time.perf_counter()
        training.prepared.resume()
        curve.training.extend(training.take_steps(stop - done))
        seconds, done = seconds + time.perf_counter() - start_s, stop
        curve.held_out[stop], curve.seconds[stop] = training.held_out_loss(), seconds
    return curve


def limit_together(rank: Rank, place: Place, rate: float | None) -> None:
    """Change the rate of all links while nobody sends."""
    torch.distributed.barrier()
    if rank.rank == 0 and not place.keeps_rate:
        place.network.set_rates(LinkSettings(rate, rate))
    report(rank, f"links at {'any speed' if rate is None else f'{rate:g} Mbit/s'}")
    torch.distributed.barrier()


def report(rank: Rank, text: str) -> None:
    """Let rank 0 say it."""
    if rank.rank == 0:
        rank.report(Progress(text))
