"""How far the predictions of ``bagua advise`` are from what the network lab measures.

Measures the steps of a perceptron on as many processes as there are hosts, all at work at the same time and without a
network, and rehearses algorithms there; then times the same algorithms on links of the lab. Nothing is fitted to those
times. Needs Linux and root.

``python -m benchmarks.prediction --hosts 2 --links 100mbit 1gbit 10gbit 50mbit,20ms``
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bagua.advise import (
    Cluster,
    MachineFacts,
    ModelFacts,
    Rehearsal,
    measure_model,
    predict,
    probe_machine,
    rehearse,
)
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.cli.lab.network import LabUnavailableError, Network, open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.link import LinkSettings, parse_link
from benchmarks.network.contenders import read_options
from benchmarks.network.experiment import Experiment, Plan
from benchmarks.network.tasks import PerceptronTask, Task

NOT_AVAILABLE = 3
CONTENDERS = (
    "ddp",
    "bytegrad",
    "power_sgd",
    "top_k:warmup_steps=0,density_steps=0",
    "sign_sgd:warmup_steps=0",
    "decentralized:peer_selection_mode='shift_one'",
    "low_precision_decentralized",
    "local_sgd",
)
DDP_BUCKET_BYTES = 25 * 1024 * 1024
MEASURED_S = 4.0


@dataclass(frozen=True)
class Cell:
    """One algorithm on one network.

    Args:
        contender: the algorithm.
        hosts: how many.
        link: link of each.
        predicted_s: seconds of a step, predicted.
        measured_s: seconds of a step, measured.
    """

    contender: str
    hosts: int
    link: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The prediction's distance from the measured time, as a part of that."""
        return self.predicted_s / self.measured_s - 1


class FixedNetwork(Network):
    """A network whose links stay as they were made: those with delay have no rate that could be set."""

    def set_rate(self, rate_mbit_s: float | None) -> None:
        """Do nothing."""


def find_out(
    rank: Rank, task: Task, hosts: int, contenders: Sequence[str]
) -> tuple[ModelFacts, MachineFacts, list[Rehearsal]]:
    """What one of several processes measures while the others do the same."""
    trainer = task.trainer(rank.rank)
    facts = measure_model(trainer.model, trainer.optimizer, trainer.step, seconds=MEASURED_S)
    facts = ModelFacts(facts.parameters, facts.steps_s, facts.optimizer, hosts)
    rehearsals = []
    for contender in contenders:
        if contender == "ddp":
            made, bucket_bytes = GradientAllReduceAlgorithm(), DDP_BUCKET_BYTES
        else:
            name, _, options = contender.partition(":")
            made, bucket_bytes = Algorithm.init(name, **read_options(options)), 10_000_000  # type: ignore[assignment]
        rehearsals.append(rehearse(made, facts, [1] * hosts, name=contender, bucket_bytes=bucket_bytes))
    return facts, probe_machine(), rehearsals


def measure(link: LinkSettings, options: argparse.Namespace, task: Task) -> dict[str, float]:
    """Median seconds of a step of each contender, on one network of the lab."""
    rate = None if link.needs_switch else link.send_mbit_s
    plan = Plan(
        options.hosts,
        (rate,),
        tuple(options.contenders),
        task,
        options.rounds,
        calls=options.calls,
        at_once=len(CONTENDERS),
    )
    with open_network(options.hosts, link) as opened:
        network = FixedNetwork(opened.hosts, opened.switch) if link.needs_switch else opened
        lines = Experiment(plan, network).time([one for one in options.contenders if one != "ddp"])
    return {line.contender: line.step.candidate_s for line in lines}


def table(cells: Sequence[Cell]) -> str:
    """All cells, and how far they are off in the middle."""
    lines = ["| algorithm | hosts | link | predicted | measured | error |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{cell.contender.partition(':')[0]}` | {cell.hosts} | {cell.link} | {cell.predicted_s * 1e3:.1f} ms "
        f"| {cell.measured_s * 1e3:.1f} ms | {cell.error:+.0%} |"
        for cell in cells
    ]
    errors = sorted(abs(cell.error) for cell in cells)
    within = sum(error <= 0.15 for error in errors) / len(errors)
    ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    lines.append("")
    lines.append(
        f"{len(cells)} cells: median error {statistics.median(errors):.1%}, {within:.0%} within 15 %, "
        f"nine in ten within {ninth:.0%}"
    )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=int, default=2, metavar="N", help="default 2")
    add("--links", type=parse_link, nargs="+", default=[parse_link("100mbit")], metavar="LINK", help="as 50mbit,20ms")
    add("--contenders", nargs="+", default=list(CONTENDERS), metavar="WHO", help="ddp, and names of algorithms")
    add("--hidden", type=int, default=512, metavar="N", help="width of the perceptron")
    add("--batch", type=int, default=64, metavar="N", help="rows in a batch")
    add("--rounds", type=int, default=2, metavar="N", help="turns of everyone")
    add("--calls", type=int, default=8, metavar="N", help="timed steps in a turn")
    add("--json", type=Path, metavar="FILE", help="write all cells to this file, after those that are there")
    add("--read", type=Path, metavar="FILE", help="measure nothing; show what was written before")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, predict, and print all cells; 3 where there cannot be a lab."""
    options = make_parser().parse_args(arguments)
    cells = [Cell(**one) for one in json.loads(options.read.read_text())] if options.read else []
    if not cells:
        try:
            for found in cells_by_link(options):
                cells += found
                add_to(options.json, found)
        except LabUnavailableError as error:
            print(error, file=sys.stderr)
            return NOT_AVAILABLE
    print(table(cells))
    return 0


def add_to(path: Path | None, cells: Sequence[Cell]) -> None:
    """Write cells after those that are in a file, if there is one."""
    if path is not None:
        before = json.loads(path.read_text()) if path.exists() else []
        path.write_text(json.dumps([*before, *map(asdict, cells)], indent=1))


def cells_by_link(options: argparse.Namespace) -> Iterator[list[Cell]]:
    """Predict first, and measure then, one link after the other."""
    task = PerceptronTask(hidden=options.hidden, outer=options.hidden, batch=options.batch)
    facts, machine, rehearsals = run_ranks(find_out, options.hosts, (task, options.hosts, options.contenders))[0]
    print(f"step alone {facts.step_s * 1e3:.1f} ms; {machine}", file=sys.stderr)
    for link in options.links:
        cluster = Cluster(options.hosts, 1, link, shared=True)
        predicted = {one.name: predict(one, facts, cluster, machine).step_s for one in rehearsals}
        measured = measure(link, options, task)
        yield [
            Cell(name, options.hosts, str(link), predicted[name], seconds)
            for name, seconds in measured.items()
            if name in predicted
        ]


if __name__ == "__main__":
    sys.exit(main())
