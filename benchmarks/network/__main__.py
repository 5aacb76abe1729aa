"""Training on a network of any speed, with every registered algorithm and with torch's DDP and its hooks.

Makes hosts out of network namespaces, limits their links, and trains one task on them with everyone in turn. Reports
each contender's step time against the baseline's, the bytes that the hosts' interfaces have really sent, and the
held-out loss after equal numbers of steps and after equal time.

What is trained does not depend on the speed of the links, unless ranks exchange when their clocks say so. So losses are
taken from training on unlimited links, after as many steps as fit into the time; algorithms that look at the clock, and
contenders of your own, are trained at each rate.

``python -m benchmarks.network --hosts 2 --rates 100 1000 10000 unlimited``
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from bagua.cli.lab.network import LabUnavailableError, open_network
from bagua.errors import BaguaError
from bagua.link import LinkSettings
from benchmarks.network.contenders import every_contender, find_maker
from benchmarks.network.experiment import LONGEST_TRAINING, Experiment, Plan
from benchmarks.network.report import draw, read_json, tables, write_json
from benchmarks.network.results import Run
from benchmarks.network.tasks import TASKS, PerceptronTask, Task
from benchmarks.paired import LEAST_ROUNDS

INTERRUPTED = 130
NOT_AVAILABLE = 3


def make_task(options: argparse.Namespace) -> Task:
    """What is trained."""
    task = TASKS[options.task](LONGEST_TRAINING * options.steps)
    if isinstance(task, PerceptronTask):
        return replace(task, hidden=options.hidden, batch=options.batch)
    return task


def a_rate(text: str) -> float | None:
    """A rate in Mbit/s, or no limit."""
    if text == "unlimited":
        return None
    rate = float(text)
    if not 0.1 <= rate <= 1e6:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 1000000 Mbit/s, or unlimited, got {text}")
    return rate


def a_delay(text: str) -> float:
    """Milliseconds."""
    delay_ms = float(text)
    if not 0 <= delay_ms <= 10_000:  # also no NaN
        raise argparse.ArgumentTypeError(f"expected 0 to 10000 ms, got {text}")
    return delay_ms


def a_contender(text: str) -> str:
    """The name of a contender that can be prepared."""
    try:
        find_maker(text)
    except (BaguaError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return text


def at_least(least: int) -> Callable[[str], int]:
    """A type of whole numbers for argparse."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"expected {least} or more, got {text}")
        return int(text)

    return number


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--hosts", type=at_least(2), default=2, metavar="N", help="default 2")
    add("--ranks-per-host", type=at_least(1), default=1, metavar="N", help="default 1")
    add("--rates", type=a_rate, nargs="+", default=[100.0], metavar="MBIT_S", help="of each link; or 'unlimited'")
    add("--delay", type=a_delay, default=0.0, metavar="MS", help="between two hosts, one way; default none")
    add(
        "--contenders",
        type=a_contender,
        nargs="+",
        metavar="WHO",
        help="default: all; see benchmarks/network/contenders.py",
    )
    add("--baseline", type=a_contender, default="ddp", metavar="WHO", help="what all are compared with; default ddp")
    add("--task", choices=list(TASKS), default="mlp", help="default mlp")
    add("--hidden", type=at_least(1), default=PerceptronTask.hidden, metavar="N", help="width of the perceptron")
    add(
        "--batch", type=at_least(1), default=PerceptronTask.batch, metavar="N", help="rows in a batch of the perceptron"
    )
    add("--rounds", type=at_least(1), default=LEAST_ROUNDS, metavar="N", help="turns of everyone; at least 20 to judge")
    add(
        "--calls",
        type=at_least(1),
        default=1,
        metavar="N",
        help="timed steps in a turn; where exchanges are rare, a multiple of their period",
    )
    add("--at-once", type=at_least(1), default=4, metavar="N", help="contenders in memory beside the baseline")
    add("--steps", type=at_least(0), default=0, metavar="N", help="train so many steps for the losses; default none")
    add("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    add("--plot", type=Path, metavar="FILE", help="draw step time against bandwidth")
    add("--read", type=Path, nargs="+", metavar="FILE", help="measure nothing; put together what was written before")
    return parser


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does: in order."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def make_plan(options: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    return Plan(
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        rates=tuple(options.rates),
        baseline=options.baseline,
        contenders=tuple(options.contenders or every_contender()),
        task=make_task(options),
        rounds=options.rounds,
        calls=options.calls,
        at_once=options.at_once,
        steps=options.steps,
        delay_ms=options.delay,
    )


def measure(plan: Plan) -> list[Run]:
    """Build the hosts and run everything on them: anew for each rate if links have a delay."""
    runs: list[Run] = []
    with termination_as_interrupt():
        for rates in [(rate,) for rate in plan.rates] if plan.delay_ms else [plan.rates]:
            link = LinkSettings(rates[0], rates[0], plan.delay_ms) if plan.delay_ms else None
            with open_network(plan.hosts, link) as network:
                if network.shortcoming:
                    print(f"warning: {network.shortcoming}")
                runs.append(Experiment(replace(plan, rates=rates), network).run())
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status.

    Args:
        arguments: of the command line.

    Returns:
        0; 1 when a limit was missed in enough rounds to judge, or somebody failed; 3 where there cannot be a lab;
        130 when interrupted. Nothing is left behind in any case.
    """
    options = make_parser().parse_args(arguments)
    try:
        runs = read_json(options.read) if options.read else measure(make_plan(options))
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return NOT_AVAILABLE
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return INTERRUPTED
    for run in runs:
        print(tables(run))
    if options.json is not None:
        write_json(runs, options.json)
    if options.plot is not None:
        for number, run in enumerate(runs):
            path = options.plot if number == 0 else options.plot.with_stem(f"{options.plot.stem}-{number}")
            drawn = draw(run, path)
            print(f"plot: {path}" if drawn else "plot: not drawn, matplotlib is not installed")
    return int(any(has_failed(run) for run in runs))


def has_failed(run: Run) -> bool:
    """Whether somebody could not run, or a promise was broken in enough rounds to judge."""
    return bool(run.failures) or (run.rounds >= LEAST_ROUNDS and any(line.missed for line in run.lines))


if __name__ == "__main__":
    sys.exit(main())
