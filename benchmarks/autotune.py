"""Whether tuning finds a good setting: an exhaustive sweep on slow links, then tuning that starts from the worst.

Hosts are network namespaces with limited links, as in ``benchmarks.network``; it needs root. Every setting (size of
buckets, flat or hierarchical) that gives other buckets is timed in turn, several times. Then training starts
anew with the slowest one, and tunes itself. What it chose is timed against the best of the sweep, in pairs: it may
take at most 1.05 times as long. The model is a stack of equal layers, so that there are many ways to cut it.

``python -m benchmarks.autotune --rate 300``
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn

from bagua import comm
from bagua.cli.lab.network import LabUnavailableError, open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.engine.autotune.tuner import ladders_of
from bagua.parallel import AutotuneSettings, ModelSwitchWrapper, Setting, bagua_init
from benchmarks.network.__main__ import NOT_AVAILABLE, termination_as_interrupt
from benchmarks.network.experiment import show
from benchmarks.network.ranks import Place, limit_together, report
from benchmarks.paired import Rounds, add_arguments, compare, conclude, measure, slowest

LIMIT = 1.05
#: With less between worst and best there is nothing to find.
LEAST_SPREAD = 1.5
BATCH = 16
LONGEST_TUNING_STEPS = 20_000


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        place: where the ranks live.
        rate: of the links, in Mbit/s; None is unlimited.
        algorithm: what is trained with.
        layers: of the model.
        width: of each layer.
        sweep_rounds: turns of each setting in the sweep.
        steps: in a turn.
        confidence_s: of tuning.
        rounds: pairs of the chosen and the best setting.
    """

    place: Place
    rate: float | None
    algorithm: str
    layers: int
    width: int
    sweep_rounds: int
    steps: int
    confidence_s: float
    rounds: int


@dataclass(frozen=True)
class Found:
    """What a rank has seen.

    Args:
        step_s: median seconds of a step, by setting.
        chosen: by tuning.
        tuning_s: seconds until the choice.
        tuning_steps: steps until the choice.
        pairs: the chosen setting against the best of the sweep; None if it is the same.
    """

    step_s: dict[Setting, float]
    chosen: Setting
    tuning_s: float
    tuning_steps: int
    pairs: Rounds | None


class Training:
    """The model on this rank.

    Args:
        plan: what is trained.
        start: the setting to begin with; None leaves it to bagua.
        autotune: how to tune, if at all.
    """

    def __init__(self, plan: Plan, start: Setting | None, autotune: AutotuneSettings | None = None) -> None:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(plan.width, plan.width), nn.ReLU()) for _ in range(plan.layers))
        model = nn.Sequential(*blocks)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options: dict[str, Any] = (
            {} if start is None else {"message_size": start.bucket_bytes, "hierarchical_reduce": start.hierarchical}
        )
        self.wrapped: ModelSwitchWrapper
        self.wrapped, self.optimizer = bagua_init(
            model, optimizer, plan.algorithm, autotune=autotune or False, **options
        )
        self.inputs = torch.randn(BATCH, plan.width)
        self.step()

    def step(self) -> None:
        """One training step; the first only shows the order of gradients."""
        self.optimizer.zero_grad()
        self.wrapped(self.inputs).square().mean().backward()
        self.optimizer.step()

    @property
    def reducer(self) -> Any:
        """What holds the setting."""
        return self.wrapped._bagua_engine.reducer  # noqa: SLF001  # the sweep sets what users leave to tuning


def sweep(rank: Rank, plan: Plan) -> dict[Setting, float]:
    """Time every setting in turn; the median over the turns, of the slowest rank in each."""
    training = Training(plan, None)
    settings = [
        setting for ladder in ladders_of(training.reducer.formation, tune_hierarchical=True) for setting in ladder
    ]
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for number in range(plan.sweep_rounds):
        for setting in settings:
            training.reducer.formation.recut(setting)
            training.step()
            torch.distributed.barrier()
            start_s = time.perf_counter()
            for _ in range(plan.steps):
                training.step()
            spent_s = torch.tensor((time.perf_counter() - start_s) / plan.steps, dtype=torch.float64)
            torch.distributed.all_reduce(spent_s, torch.distributed.ReduceOp.MAX)
            seconds[setting].append(float(spent_s))
        report(rank, f"sweep {number + 1} of {plan.sweep_rounds}: {len(settings)} settings")
    return {setting: statistics.median(times) for setting, times in seconds.items()}


def tune(rank: Rank, plan: Plan, start: Setting) -> tuple[Setting, float, int]:
    """Train from ``start`` until tuning has chosen: the choice, and the seconds and steps that it took."""
    report(rank, f"tuning starts from {start}")
    training = Training(plan, start, AutotuneSettings(0, plan.confidence_s))
    tuner = training.wrapped._bagua_engine.tuner  # noqa: SLF001  # users need not know when it is over
    began_s = time.perf_counter()
    for number in range(LONGEST_TUNING_STEPS):
        training.step()
        if tuner.settled:
            return training.wrapped.bagua_setting, time.perf_counter() - began_s, number + 1
    raise RuntimeError(f"no choice after {LONGEST_TUNING_STEPS} steps")


def search(rank: Rank, plan: Plan) -> Found:
    """All of it, on one rank."""
    plan.place.join(rank)
    limit_together(rank, plan.place, plan.rate)
    step_s = sweep(rank, plan)
    best, worst = min(step_s, key=step_s.__getitem__), max(step_s, key=step_s.__getitem__)
    chosen, tuning_s, tuning_steps = tune(rank, plan, worst)
    report(rank, f"chose {chosen}; the best of the sweep is {best}")
    pairs = None
    if chosen != best:
        with_best, with_chosen = Training(plan, best), Training(plan, chosen)
        pairs = measure(
            with_best.step, with_chosen.step, rounds=plan.rounds, calls=plan.steps,
            before_each=torch.distributed.barrier,
        )  # fmt: skip
    comm.destroy_process_group()
    return Found(step_s, chosen, tuning_s, tuning_steps, pairs)


def table(step_s: dict[Setting, float], chosen: Setting) -> str:
    """The sweep, a line for each setting, the quickest first."""
    best_s = min(step_s.values())
    lines = [f"{'bucket bytes':>14} {'form':<13} {'ms a step':>10} {'against the best':>17}"]
    for setting, seconds in sorted(step_s.items(), key=lambda item: item[1]):
        form = "hierarchical" if setting.hierarchical else "flat"
        mark = "  <- chosen by tuning" if setting == chosen else ""
        lines.append(f"{setting.bucket_bytes:>14} {form:<13} {1e3 * seconds:>10.1f} {seconds / best_s:>17.2f}{mark}")
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.autotune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, rounds=20)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--ranks-per-host", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--rate", type=float, default=300.0, metavar="MBIT_S", help="of each link; default 300")
    parser.add_argument("--algorithm", default="gradient_allreduce", help="default gradient_allreduce")
    parser.add_argument("--backend", default="gloo", help="of bagua; default gloo")
    parser.add_argument("--layers", type=int, default=32, metavar="N", help="of the model; default 32")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="of each layer; default 128")
    parser.add_argument("--sweep-rounds", type=int, default=5, metavar="N", help="turns of each setting; default 5")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps in a turn; default 3")
    parser.add_argument("--confidence", type=float, default=1.0, metavar="S", help="of a sample of tuning; default 1")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status: 3 where there cannot be a lab, 1 when the limit was missed."""
    options = make_parser().parse_args(arguments)
    try:
        with termination_as_interrupt(), open_network(options.hosts) as network:
            plan = Plan(
                Place(network, options.ranks_per_host, options.backend),
                options.rate,
                options.algorithm,
                options.layers,
                options.width,
                options.sweep_rounds,
                options.steps,
                options.confidence,
                options.rounds,
            )
            found: list[Found] = run_ranks(search, plan.place.world_size, (plan,), show, network)
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return NOT_AVAILABLE
    return tell(found, options)


def tell(found: Sequence[Found], options: argparse.Namespace) -> int:
    """Print the sweep, what tuning chose, and how good that is."""
    first = found[0]
    best_s, worst_s = min(first.step_s.values()), max(first.step_s.values())
    print(table(first.step_s, first.chosen))
    lines = []
    if first.pairs is not None:
        pairs = slowest([one.pairs for one in found if one.pairs is not None])
        lines.append(compare("chosen by tuning : best of the sweep", pairs, LIMIT))
    notes = {
        "worst of the sweep : best of the sweep": round(worst_s / best_s, 2),
        "enough between them to find something": worst_s / best_s >= LEAST_SPREAD,
        "chosen is the best of the sweep": first.pairs is None,
        "chosen : best, by the sweep": round(first.step_s.get(first.chosen, float("nan")) / best_s, 3),
        "seconds until the choice": round(first.tuning_s, 1),
        "steps until the choice": first.tuning_steps,
    }
    return conclude(lines, options, notes)


if __name__ == "__main__":
    sys.exit(main())
