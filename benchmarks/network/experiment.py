"""From a plan to lines of a table: who runs when, and for how long."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bagua.algorithms import registry
from bagua.cli.lab.network import Network
from bagua.cli.launch import RanksFailedError, run_ranks
from benchmarks.network.ranks import Curve, Order, Place, Progress, Timed, time_contenders, train_contenders
from benchmarks.network.results import Limit, Line, Loss, Run, find_limit, make_line
from benchmarks.network.tasks import PerceptronTask, Task

__all__ = ["LONGEST_TRAINING", "Experiment", "Plan"]

#: Nobody trains more than this many times as long as the others, however quick its steps are.
LONGEST_TRAINING = 4

Curves = dict[tuple[str, float | None], Curve]


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Args:
        hosts: how many.
        ranks_per_host: on each.
        rates: of all links, in Mbit/s; None is unlimited.
        baseline: what all others are compared with.
        contenders: who takes part.
        task: what is trained.
        rounds: turns of each contender at each rate.
        calls: timed steps in a turn.
        at_once: contenders that are in memory at a time, beside the baseline.
        steps: after which losses are compared; 0 leaves losses out.
        delay_ms: between two hosts, one way.
    """

    hosts: int
    rates: tuple[float | None, ...]
    contenders: tuple[str, ...]
    task: Task
    rounds: int
    baseline: str = "ddp"
    ranks_per_host: int = 1
    calls: int = 1
    at_once: int = 4
    steps: int = 0
    delay_ms: float = 0.0


class Experiment:
    """One run of the lab.

    Args:
        plan: what to do.
        network: of as many hosts as planned.
    """

    def __init__(self, plan: Plan, network: Network) -> None:
        self.plan = plan
        self.place = Place(network, plan.ranks_per_host, keeps_rate=plan.delay_ms > 0)
        self.failures: dict[str, str] = {}

    def run(self) -> Run:
        """Time everyone, then train everyone."""
        plan = self.plan
        others = [contender for contender in plan.contenders if contender != plan.baseline]
        found: dict[tuple[str, float | None], Line] = {}
        for start in range(0, max(1, len(others)), plan.at_once):
            for line in self.time(others[start : start + plan.at_once]):
                found.setdefault((line.contender, line.rate_mbit_s), line)
        lines = self.add_losses(list(found.values())) if plan.steps else list(found.values())
        return Run(
            plan.hosts,
            plan.ranks_per_host,
            plan.task.title,
            plan.baseline,
            plan.rounds,
            lines,
            dict(self.failures),
            plan.delay_ms,
        )

    def time(self, contenders: Sequence[str]) -> list[Line]:
        """Lines of the baseline and of a few contenders, which take turns."""
        plan = self.plan
        everyone = [plan.baseline, *contenders, plan.baseline]
        arguments = (self.place, plan.task, everyone, plan.rates, plan.rounds, plan.calls)
        try:
            of_ranks: list[Timed] = run_ranks(
                time_contenders, self.place.world_size, arguments, show, self.place.network
            )
        except RanksFailedError as failed:
            self.failures.update(dict.fromkeys(contenders, str(failed)))
            return []
        refusals = of_ranks[0].refusals
        self.failures.update(refusals)
        present = [contender for contender in everyone if contender not in refusals]
        lines = []
        for number, rate in enumerate(plan.rates):
            of_rate = [timed.samples[number] for timed in of_ranks]
            for which, contender in enumerate(present[:-1]):
                samples = [(turns[0], turns[which], turns[-1]) for turns in of_rate]
                lines.append(make_line(contender, rate, samples, plan.hosts, self.limit(rate, contender)))
        return lines

    def limit(self, rate: float | None, contender: str) -> Limit | None:
        """What is promised here; nothing for other tasks than the one of which it was promised."""
        if self.plan.task != PerceptronTask() or self.plan.ranks_per_host > 1:
            return None
        return find_limit(self.plan.hosts, rate, self.plan.baseline, contender)

    def add_losses(self, lines: list[Line]) -> list[Line]:
        """The same lines, with what training leads to."""
        orders = self.orders(lines)
        curves: Curves = {}
        for start in range(0, len(orders), self.plan.at_once):
            curves.update(self.train(orders[start : start + self.plan.at_once]))
        return [replace(line, loss=self.loss(line, curves)) for line in lines]

    def orders(self, lines: list[Line]) -> list[Order]:
        """What has to be trained for these lines."""
        found: dict[tuple[str, float | None], set[int]] = {}
        for line in lines:
            stops = found.setdefault((line.contender, trained_at(line)), {self.plan.steps})
            stops.add(self.steps_in_time(line)[0])
        return [Order(*case, tuple(sorted(stops))) for case, stops in found.items()]

    def train(self, orders: list[Order]) -> Curves:
        """The curves of some orders; none if training fails."""
        arguments = (self.place, self.plan.task, orders)
        try:
            of_ranks = run_ranks(train_contenders, self.place.world_size, arguments, show, self.place.network)
            curves: list[Curve] = of_ranks[0]
        except RanksFailedError as failed:
            self.failures["training with " + ", ".join(order.contender for order in orders)] = str(failed)
            return {}
        return {(order.contender, order.rate): curve for order, curve in zip(orders, curves, strict=True)}

    def steps_in_time(self, line: Line) -> tuple[int, bool]:
        """Steps that a contender takes while the baseline takes its number, and whether it could take more."""
        fitting = round(self.plan.steps * line.step.baseline_s / line.step.candidate_s)
        longest = LONGEST_TRAINING * self.plan.steps
        return max(1, min(fitting, longest)), fitting > longest

    def loss(self, line: Line, curves: Curves) -> Loss | None:
        """What a line's curve says about it; None where training failed."""
        curve = curves.get((line.contender, trained_at(line)))
        if curve is None:
            return None
        in_time, capped = self.steps_in_time(line)
        return Loss(self.plan.steps, curve.held_out[self.plan.steps], in_time, curve.held_out[in_time], capped)


def trained_at(line: Line) -> float | None:
    """At which rate to train for a line: at none unless the speed of links may change what is computed."""
    name, _, rest = line.contender.partition(":")
    is_unknown = bool(rest) and "=" not in rest
    is_rank_local = name in registry and registry.get(name)().in_background
    return line.rate_mbit_s if is_unknown or is_rank_local else None


def show(message: object) -> None:
    """Say what goes on, on standard error."""
    if isinstance(message, Progress):
        print(f"  {message.text}", file=sys.stderr, flush=True)
