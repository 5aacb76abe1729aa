"""How long training takes to the loss that is wanted, for everyone on every link.

A small transformer reads bytes of Python's standard library. Wanted is the held-out loss that torch's DDP has after
90 % of its steps, plus 1 %; the loss is that of the mean weights of all ranks, and has to stay there. Losses by steps
do not depend on the link, and the time of a step does not depend on the loss. Both are measured apart and multiplied:

* ``losses``: everyone trains with each learning rate on one seed, and with the best of them on the others;
* ``paces``: the mean time of a step on each link, over whole periods, the steps of a beginning apart;
* ``whole``: the best of the contenders train on a link from the first step to the last, which proves the product;
* ``memory``: the most memory that a rank holds, in copies of the weights of a model with 50 million parameters;
* ``report``: tables, and with ``--plot`` a picture, of what the folder holds.

Each cell is a line of ``cells.jsonl`` in the folder. What is there is not measured again, so a run may be cut off.
Contenders are those of ``python -m benchmarks.network`` and the functions of ``benchmarks/time_to_loss/peers.py``;
``ddp@750`` takes part with 750 steps, and a schedule made for them.

``python -m benchmarks.time_to_loss losses paces memory report --folder out --hosts 2 --resume``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bagua.cli.lab.network import LabUnavailableError
from bagua.errors import BaguaError
from bagua.link import parse_link
from benchmarks.network.__main__ import INTERRUPTED, NOT_AVAILABLE, at_least, termination_as_interrupt
from benchmarks.network.contenders import find_maker
from benchmarks.time_to_loss.folder import Folder
from benchmarks.time_to_loss.measuring import SHAPE, Trained, losses, memory, paces, whole
from benchmarks.time_to_loss.peers import expand
from benchmarks.time_to_loss.reaching import period_of, segments, split
from benchmarks.time_to_loss.report import BASELINE, Question, Report, draw, pace_settings

LINKS = ("10mbit", "100mbit", "1000mbit", "10000mbit", "100mbit,20ms", "1000mbit,20ms")
#: Everyone with the recipe of its documentation; a beginning is a fifth of 400 steps unless the recipe says otherwise.
CONTENDERS = (
    "ddp_fp16",
    "ddp_powersgd",
    "post_local_sgd:sync_every=8,start_after=80",
    "accelerate:sync_every=4",
    "accelerate:sync_every=8",
    "accelerate:sync_every=32",
    "decent_dp",
    "gradient_allreduce",
    "bytegrad",
    "power_sgd",
    "loco:warmup_steps=40",
    "dion",
    "sign_sgd:warmup_steps=80",
    "top_k:warmup_steps=40,density_steps=80",
    "qadam:warmup_steps=80",
    "one_bit_adam:warmup_steps=80",
    "one_bit_lamb:warmup_steps=80",
    "decentralized:peer_selection_mode='shift_one'",
    "low_precision_decentralized",
    "decentralized_data_parallel",
    "local_sgd:sync_every=8",
    "local_sgd:sync_every=4,codec=int4,overlap=3",
    "slowmo:sync_every=8",
    "diloco:sync_every=20,start_after=120",
    "sparse_loco:sync_every=10,start_after=120",
)
KINDS = ("losses", "paces", "whole", "memory", "report")
Task = tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]


def a_contender(text: str) -> str:
    """A contender that can be prepared and timed."""
    name = split(text, 1)[0]
    try:
        find_maker(expand(name))
        segments(name)
        period_of(name)
    except (BaguaError, ValueError, TypeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    return text


def a_link(text: str) -> str:
    """A link as it is named in cells."""
    try:
        return str(parse_link(text))
    except (BaguaError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = parser.add_argument, Question()
    add("what", choices=KINDS, nargs="+", help="what to measure, in this order; and the report")
    add("--folder", type=Path, required=True, metavar="DIR", help="holds the cells")
    add("--resume", action="store_true", help="go on with the cells that are in the folder")
    add("--limit-s", type=float, default=1200.0, metavar="S", help="seconds of a cell at most; default 1200")
    add("--hosts", type=at_least(2), default=default.hosts, metavar="N", help="default 2")
    add("--links", type=a_link, nargs="+", default=LINKS, metavar="LINK", help=f"default {' '.join(LINKS)}")
    add("--contenders", type=a_contender, nargs="+", default=CONTENDERS, metavar="WHO", help="beside ddp; default all")
    add("--steps", type=at_least(1), default=default.steps, metavar="N", help="default 400")
    add("--rates", type=float, nargs="+", default=default.rates, metavar="LR", help="highest rates to choose from")
    add("--tuning-seed", type=at_least(0), default=default.tuning_seed, metavar="N", help="chooses them; default 5")
    add("--seeds", type=at_least(0), nargs="+", default=default.seeds, metavar="N", help="reported; default 0 1")
    add("--shape", default=SHAPE, help=f"of the transformer; default {SHAPE}")
    add("--seconds", type=float, default=10.0, metavar="S", help="to time steps of one contender; default 10")
    add("--plot", type=Path, metavar="FILE", help="draw the best of each against the link")
    return parser


def question_of(options: argparse.Namespace) -> Question:
    """What the command line asks for."""
    return Question(
        options.hosts,
        options.steps,
        tuple(options.rates),
        options.tuning_seed,
        tuple(options.seeds),
        options.shape,
    )


def tasks(what: str, options: argparse.Namespace, report: Report) -> Iterator[Task]:
    """The cells of one kind, each asked for when those before it are known."""
    question, everyone = report.question, list(dict.fromkeys((BASELINE, *options.contenders)))
    makers = {"losses": to_train, "paces": to_time, "whole": to_train_whole, "memory": to_fill}
    yield from makers[what](everyone, question, report, options)


def to_train(everyone: Sequence[str], question: Question, report: Report, _: argparse.Namespace) -> Iterator[Task]:
    """Each learning rate from one seed, and the best of them from the others."""
    for contender in everyone:
        seeds = [(lr, question.tuning_seed) for lr in question.rates]
        yield from (train_cell(question, question.trained(contender, *one)) for one in seeds)
        rate = report.best_rate(contender)
        chosen = [] if rate is None else [(rate, seed) for seed in question.seeds]
        yield from (train_cell(question, question.trained(contender, *one)) for one in chosen)


def train_cell(question: Question, trained: Trained) -> Task:
    """One training without a link."""
    return "losses", question.settings(trained), partial(losses, trained, question.hosts)


def to_time(everyone: Sequence[str], question: Question, _: Report, options: argparse.Namespace) -> Iterator[Task]:
    """Each kind of steps on each link."""
    names = dict.fromkeys(segment.contender for one in everyone for segment in segments(split(one, 0)[0]))
    for link in options.links:
        for name in names:
            trained = Trained(name, 10**4, question.rates[0], 0, question.shape)
            measure = partial(paces, trained, question.hosts, link, period_of(name), options.seconds)
            yield "paces", pace_settings(name, question, link), measure


def to_train_whole(
    everyone: Sequence[str], question: Question, report: Report, options: argparse.Namespace
) -> Iterator[Task]:
    """Each contender with its best rate on each link, from the first of the seeds."""
    for link in options.links:
        for contender in everyone:
            if (rate := report.best_rate(contender)) is not None:
                trained = question.trained(contender, rate, question.seeds[0])
                settings = {**question.settings(trained), "link": link}
                yield "whole", settings, partial(whole, trained, question.hosts, link)


def to_fill(everyone: Sequence[str], question: Question, _: Report, __: argparse.Namespace) -> Iterator[Task]:
    """Each contender after its beginning, and plain training."""
    for name in dict.fromkeys(["plain", *(segments(split(one, 0)[0])[-1].contender for one in everyone)]):
        settings = {"contender": name, "hosts": question.hosts}
        yield "memory", settings, partial(memory, name, question.hosts, period_of(name))


def show(report: Report, options: argparse.Namespace) -> None:
    """Print the tables; draw."""
    for link in options.links:
        print(report.table(options.contenders, link))
    print(report.summary_table(options.contenders, options.links))
    if options.plot is not None:
        drawn = draw(report.summary(options.contenders, options.links), options.links, options.plot)
        print(f"plot: {options.plot}" if drawn else "plot: not drawn, matplotlib is not installed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status.

    Args:
        arguments: of the command line.

    Returns:
        0; 1 when cells failed; 3 where there cannot be a lab; 130 when interrupted.
    """
    options = make_parser().parse_args(arguments)
    try:
        folder = Folder(options.folder, options.limit_s, resume=options.resume or options.what == ["report"])
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    report, failed = Report(folder, question_of(options)), 0
    try:
        with termination_as_interrupt():
            for what in options.what:
                cells = [] if what == "report" else tasks(what, options, report)
                failed += sum(bool(folder.measure(*task).error) for task in cells)
                if what == "report":
                    show(report, options)
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return NOT_AVAILABLE
    except LookupError as error:  # Nothing can be compared.
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all processes have ended, and the cells before are kept", file=sys.stderr)
        return INTERRUPTED
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
