"""How far the predictions of ``bagua advise`` are from what the network lab measures.

Measures the steps of a perceptron on as many processes as there are hosts, without a network, rehearses algorithms, and
measures calls on links without a limit; then times the same algorithms on links of the lab. Nothing is fitted to those
times. A shared machine is faster in one minute than in the next, so steps without an exchange are timed in turn with
the algorithms, and say by how much its processor is slower than when it was measured first. Needs Linux and root.

``python -m benchmarks.prediction --hosts 2 --links 100mbit 1gbit 50mbit,20ms``

The whole grid is ``--grid --json cells.json``. A cell that is in the file is not measured again, so a run that was cut
off goes on. ``python -m benchmarks.prediction --read cells.json`` makes tables of what was measured.

Of all 99 cells, with 2 and 4 hosts, with and without a delay of 20 ms, half are within 3.6 %, and 93 % within 15 %
(2026-11-24). Cells in which other processes had more than 5 % of the cores, or the switch was late, do not count. Those
furthest off are predicted too slow: ``ddp`` at 10 Gbit/s, ``low_precision_decentralized`` on fast links with 20 ms, and
``ddp`` and ``local_sgd`` among four hosts at 100 Mbit/s with 20 ms.

Some cells of the grid (2 hosts, 2 cores, 2026-11-24): the measured time of a step in ms, and in brackets by how many
percent the prediction was off.

| algorithm | 10000mbit | 1000mbit | 100mbit | 10mbit |
|---|---|---|---|---|
| ``ddp`` | 13.2 (+18) | 41.9 (+2) | 353.3 (-1) | 3519.5 (0) |
| ``bytegrad`` | 21.8 (-7) | 25.8 (-6) | 92.7 (-4) | 886.0 (0) |
| ``power_sgd`` | 19.3 (-10) | 17.7 (-3) | 19.5 (-7) | 66.5 (-8) |
| ``local_sgd`` | 8.6 (-4) | 12.0 (0) | 50.9 (-1) | 441.1 (0) |
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from bagua.advise import (
    Advice,
    CallFacts,
    Cluster,
    MachineFacts,
    Message,
    ModelFacts,
    Prediction,
    Rehearsal,
    measure_model,
    predict,
    rehearse,
)
from bagua.advise.measure import ALONE, Others
from bagua.algorithms import Algorithm, GradientAllReduceAlgorithm
from bagua.cli.lab.network import LabUnavailableError, Network, open_network
from bagua.cli.lab.switch import SwitchReport
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import destroy_process_group
from bagua.link import LinkSettings, parse_link
from benchmarks.lab_calls import lab_cluster, probe_lab, probe_link
from benchmarks.network.contenders import Prepared, read_options
from benchmarks.network.experiment import show
from benchmarks.network.ranks import Place, limit_together, report, warm_up
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
GRID = tuple(
    (hosts, parse_link(rate + delay))
    for delay in ("", ",20ms")
    for hosts in (2, 4)
    for rate in ("10gbit", "1gbit", "100mbit", "10mbit")
)
DDP_BUCKET_BYTES = 25 * 1024 * 1024
#: Steps of each rank alone, which tell the pace of the machine.
PLAIN = "benchmarks.prediction:plain"
MEASURED_S = 4.0
#: A turn is about so long, but at least a period of the algorithm, and at least two steps.
TURN_S = 1.0
#: The switch carries a link if fewer of its frames leave late.
CARRIED = 0.01


@dataclass(frozen=True)
class Cell:
    """One algorithm on one network.

    Args:
        contender: the algorithm.
        hosts: how many.
        link: link of each.
        predicted_s: seconds of a step, predicted.
        measured_s: seconds of a step, measured.
        late: part of the frames that left the switch more than a millisecond late; 0 without a switch.
        others: part of the machine's cores that other processes had meanwhile.
        keeps_equal: whether ranks hold equal weights after each step.
        pace: how many times as long the machine took for a step without an exchange as when it was measured first.
    """

    contender: str
    hosts: int
    link: str
    predicted_s: float
    measured_s: float
    late: float = 0.0
    others: float = 0.0
    keeps_equal: bool = True
    pace: float = 1.0

    @property
    def name(self) -> str:
        """Name of the algorithm."""
        return self.contender.partition(":")[0]

    @property
    def error(self) -> float:
        """The prediction's distance from the measured time, as a part of that."""
        return self.predicted_s / self.measured_s - 1

    @property
    def counts(self) -> bool:
        """Whether the lab could carry what was sent, and had the machine for itself."""
        return self.late <= CARRIED and self.others <= ALONE


@dataclass(frozen=True)
class Ground:
    """What predictions for one number of hosts are made from; none of it depends on what is compared with it.

    Args:
        facts: the model.
        rehearsals: rehearsals of all contenders.
        machine: what calls cost without a network.
    """

    facts: ModelFacts
    rehearsals: tuple[Rehearsal, ...]
    machine: MachineFacts

    def at_pace(self, factor: float) -> "Ground":
        """The same on a machine that takes ``factor`` times as long for what its processor does."""
        facts = replace(
            self.facts,
            parameters=tuple(replace(one, arrival_s=one.arrival_s * factor) for one in self.facts.parameters),
            steps_s=tuple(step * factor for step in self.facts.steps_s),
        )
        rehearsals = tuple(_at_pace(one, factor) for one in self.rehearsals)
        calls = tuple(
            replace(
                one,
                message_s=one.message_s * factor,
                points=tuple((sent, seconds * factor) for sent, seconds in one.points),
            )
            for one in self.machine.calls
        )
        seconds = ("message_s", "byte_s", "local_message_s", "local_byte_s")
        machine = replace(self.machine, calls=calls, **{name: getattr(self.machine, name) * factor for name in seconds})
        return Ground(facts, rehearsals, machine)


def _at_pace(rehearsal: Rehearsal, factor: float) -> Rehearsal:
    runs = (
        replace(run, items=tuple(item if isinstance(item, Message) else item * factor for item in run.items))
        for run in rehearsal.runs
    )
    return replace(rehearsal, runs=tuple(runs), extra_s=rehearsal.extra_s * factor)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """A contender that trains alone."""
    return Prepared(model, optimizer)


def find_out(rank: Rank, task: Task, hosts: int, contenders: Sequence[str]) -> tuple[ModelFacts, list[Rehearsal]]:
    """What one of several processes measures while the others do the same."""
    trainer = task.trainer(rank.rank)
    facts = measure_model(trainer.model, trainer.optimizer, trainer.step, seconds=MEASURED_S)
    rehearsals = []
    for contender in contenders:
        if contender == "ddp":
            made, bucket_bytes = GradientAllReduceAlgorithm(), DDP_BUCKET_BYTES
        else:
            name, _, options = contender.partition(":")
            made, bucket_bytes = Algorithm.init(name, **read_options(options)), 10_000_000  # type: ignore[assignment]
        rehearsals.append(rehearse(made, facts, [1] * hosts, name=contender, bucket_bytes=bucket_bytes))
    return facts, rehearsals


def time_all(
    rank: Rank, place: Place, task: Task, rate_mbit_s: float | None, calls: dict[str, int], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step of each contender in each of its turns, on this rank.

    Args:
        rank: which one this is.
        place: where it lives.
        task: what is trained.
        rate_mbit_s: rate of the links; None leaves them as they are.
        calls: timed steps in a turn of each contender.
        rounds: turns of each.
    """
    place.join(rank)
    trainings, _ = warm_up(rank, task, list(calls))
    if rate_mbit_s is not None:
        limit_together(rank, place, rate_mbit_s)
    found: dict[str, list[float]] = {contender: [] for contender in trainings}
    for number in range(rounds):
        for contender, training in trainings.items():
            found[contender].append(training.turn(rank, place, calls[contender]).step_s)
        report(rank, f"round {number + 1} of {rounds}")
    destroy_process_group()
    return found


def measure(
    hosts: int, link: LinkSettings, task: Task, calls: dict[str, int], rounds: int
) -> tuple[dict[str, float], float]:
    """Median seconds of a step on the slowest rank, by contender, and the part of frames that left the switch late."""
    reports: list[SwitchReport] = []
    with open_network(hosts, None if not link.needs_switch else link, reports.append) as opened:
        network = Network(opened.hosts, opened.switch)
        rate = None if link.needs_switch else link.send_mbit_s
        of_ranks = run_ranks(time_all, hosts, (Place(network), task, rate, calls, rounds), show, network)
    late = sum(one.late_frames for one in reports) / max(sum(one.frames for one in reports), 1)
    slowest = {
        who: [max(turns) for turns in zip(*(rank[who] for rank in of_ranks), strict=True)] for who in of_ranks[0]
    }
    return {who: statistics.median(turns) for who, turns in slowest.items()}, late


def steps_of_turn(rehearsal: Rehearsal, predicted_s: float) -> int:
    """Timed steps: whole periods, for about ``TURN_S``."""
    period = max(len(rehearsal.steps), 2)
    return period * max(round(TURN_S / (period * predicted_s)), 1)


def task_of(options: argparse.Namespace) -> PerceptronTask:
    """What is trained."""
    return PerceptronTask(hidden=options.hidden, outer=options.hidden, batch=options.batch)


def ground_of(hosts: int, options: argparse.Namespace) -> Ground:
    """What predictions for so many hosts are made from."""
    facts, rehearsals = run_ranks(find_out, hosts, (task_of(options), hosts, options.contenders))[0]
    machine = probe_lab(hosts)
    print(f"{hosts} hosts: step alone {facts.step_s * 1e3:.1f} ms; {machine}", file=sys.stderr)
    return Ground(facts, tuple(rehearsals), machine)


def predictions(
    hosts: int, link: LinkSettings, ground: Ground, calls: tuple[CallFacts, ...], pace: float = 1.0
) -> dict[str, Prediction]:
    """Predictions of all contenders, by name."""
    cluster, ground = lab_cluster(hosts, 1, link, calls), ground.at_pace(pace)
    return {one.name: predict(one, ground.facts, cluster, ground.machine) for one in ground.rehearsals}


def plain_step_s(ground: Ground, hosts: int) -> float:
    """Seconds of a step without an exchange, as it was measured first, with the turns of ranks that share a core."""
    return ground.facts.step_s * max(1.0, hosts / ground.machine.cores)


def cells_of(
    hosts: int, link: LinkSettings, options: argparse.Namespace, ground: Ground, contenders: Sequence[str]
) -> Iterator[list[Cell]]:
    """Predict first, and measure then: all together, or one by one behind a switch."""
    task = task_of(options)
    on_link = probe_link(hosts, link)
    expected = predictions(hosts, link, ground, on_link)
    calls = {
        one.name: steps_of_turn(one, expected[one.name].step_s) for one in ground.rehearsals if one.name in contenders
    }
    one_by_one = [{name: number} for name, number in calls.items()] if link.needs_switch else [calls]
    for some in one_by_one:
        others = Others()
        measured, late = measure(
            hosts, link, task, {PLAIN: round(TURN_S / ground.facts.step_s), **some}, options.rounds
        )
        share, pace = others.share(), measured.pop(PLAIN) / plain_step_s(ground, hosts)
        predicted = predictions(hosts, link, ground, on_link, pace)
        yield [
            Cell(
                name, hosts, str(link), predicted[name].step_s, seconds, late, share, predicted[name].keeps_equal, pace
            )
            for name, seconds in measured.items()
        ]


def missing(options: argparse.Namespace, known: Sequence[Cell]) -> list[tuple[int, LinkSettings, list[str]]]:
    """What is to be measured: hosts, link, and contenders whose cell is not there."""
    wanted = GRID if options.grid else [(options.hosts, link) for link in options.links]
    there = {(cell.hosts, cell.link, cell.contender) for cell in known}
    found = [
        (hosts, link, [one for one in options.contenders if (hosts, str(link), one) not in there])
        for hosts, link in wanted
    ]
    return [one for one in found if one[2]]


def groups_of(cells: Sequence[Cell]) -> dict[tuple[int, str], list[Cell]]:
    """Cells by hosts and link, in the order in which they came."""
    found: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.hosts, cell.link), []).append(cell)
    return found


def named(cells: Sequence[Cell]) -> Cell:
    """The algorithm that advice takes for the fastest, if ranks may differ."""
    predictions = sorted(
        (Prediction(cell.contender, cell.predicted_s, 0.0, 0.0, 0.0, cell.keeps_equal, "") for cell in cells),
        key=lambda one: one.step_s,
    )
    best = Advice(Cluster(cells[0].hosts), tuple(predictions), "").fastest(may_differ=True)
    return next(cell for cell in cells if cell.contender == best.name)


def tables(cells: Sequence[Cell]) -> str:
    """A table for each number of hosts and delay, with the rates as columns, and how far all cells are off."""
    groups = groups_of(cells)
    found: list[str] = []
    for hosts, delay in dict.fromkeys((hosts, link.partition(",")[2]) for hosts, link in groups):
        links = [link for number, link in groups if number == hosts and link.partition(",")[2] == delay]
        names = list(dict.fromkeys(cell.contender for link in links for cell in groups[hosts, link]))
        found += [f"| {hosts} hosts | " + " | ".join(links) + " |", "|---" * (len(links) + 1) + "|"]
        for name in names:
            texts = [
                next((text_of(cell) for cell in groups[hosts, link] if cell.contender == name), "") for link in links
            ]
            found.append(f"| `{name.partition(':')[0]}` | " + " | ".join(texts) + " |")
        found.append("")
    return "\n".join([*found, summary(cells)])


def text_of(cell: Cell) -> str:
    """Predicted, measured, and the error."""
    text = f"{cell.predicted_s * 1e3:.1f} / {cell.measured_s * 1e3:.1f} ms, {cell.error:+.0%}"
    return text if cell.counts else f"({text})"


def summary(cells: Sequence[Cell]) -> str:
    """How far all cells are off that count, and how often the right algorithm is named."""
    counted = [cell for cell in cells if cell.counts]
    left = len(cells) - len(counted)
    lines = [f"{left} cells in brackets do not count: the switch was late, or others had the cores"] if left else []
    if counted:
        errors = sorted(abs(cell.error) for cell in counted)
        within = sum(error <= 0.15 for error in errors) / len(errors)
        ninth = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        lines.append(
            f"{len(counted)} cells: median error {statistics.median(errors):.1%}, {within:.0%} within 15 %, "
            f"nine in ten within {ninth:.0%}"
        )
    whole = [of for of in groups_of(counted).values() if len(of) > 1 and any(cell.contender == "ddp" for cell in of)]
    if whole:
        ratios = [named(of).measured_s / min(cell.measured_s for cell in of) for of in whole]
        good = sum(ratio <= 1.05 for ratio in ratios)
        lines.append(f"the named algorithm takes at most 1.05 of the best time on {good} of {len(ratios)} networks")
        lines += [
            f"  {of[0].hosts} hosts, {of[0].link}: {named(of).name}, {ratio:.2f} of the best"
            for of, ratio in zip(whole, ratios, strict=True)
        ]
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
    add("--grid", action="store_true", help="2 and 4 hosts, 10 Mbit/s to 10 Gbit/s, without and with 20 ms")
    add("--contenders", nargs="+", default=list(CONTENDERS), metavar="WHO", help="ddp, and names of algorithms")
    add("--hidden", type=int, default=512, metavar="N", help="width of the perceptron")
    add("--batch", type=int, default=64, metavar="N", help="rows in a batch")
    add("--rounds", type=int, default=3, metavar="N", help="turns of everyone")
    add("--json", type=Path, metavar="FILE", help="write cells to this file, after those that are there")
    add("--read", type=Path, metavar="FILE", help="measure nothing; show what was written before")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, predict, and print all cells; 3 where there cannot be a lab."""
    options = make_parser().parse_args(arguments)
    cells = cells_in(options.read or options.json)
    try:
        for found in [] if options.read else new_cells(options, cells):
            print(tables(found), flush=True)
            cells += found
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return NOT_AVAILABLE
    print(tables(cells))
    return 0


def new_cells(options: argparse.Namespace, known: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells of one network after the other, written as soon as they are there."""
    grounds: dict[int, Ground] = {}
    for hosts, link, contenders in missing(options, known):
        ground = grounds[hosts] = grounds.get(hosts) or ground_of(hosts, options)
        for found in cells_of(hosts, link, options, ground, contenders):
            add_to(options.json, found)
            yield found


def cells_in(path: Path | None) -> list[Cell]:
    """What was written before."""
    return [Cell(**one) for one in json.loads(path.read_text())] if path is not None and path.exists() else []


def add_to(path: Path | None, cells: Sequence[Cell]) -> None:
    """Write cells after those that are in a file, if there is one."""
    if path is not None:
        path.write_text(json.dumps([asdict(cell) for cell in [*cells_in(path), *cells]], indent=1))


if __name__ == "__main__":
    sys.exit(main())
