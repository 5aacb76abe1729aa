"""The command line of ``bagua demo``."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bagua.algorithms import registry
from bagua.checks import install_command
from bagua.cli.arguments import above_zero, positive, some_seconds
from bagua.cli.demo.comparison import CONTESTANTS, MOST_STEPS, Contest, compare
from bagua.cli.demo.report import comparison_table, draw_comparison, draw_losses, show_progress, table
from bagua.cli.demo.shaping import open_slow_link
from bagua.cli.demo.training import DECENTRALIZED, Result, Settings, train
from bagua.cli.launch import RanksFailedError, run_ranks
from bagua.errors import BaguaError, UnsupportedAlgorithmException

RANKS_PER_CORE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a small language model on a few processes and say how it went.

    Args:
        arguments: words that follow ``bagua demo`` on the command line.

    Returns:
        The exit status: 0, 1 when a rank failed, 130 after Ctrl-C. Bad arguments exit with 2.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    settings = make_settings(parser, options)
    print(f"starting {options.nproc} processes", flush=True)
    try:
        if options.algorithm is None:
            show_comparison(settings, options)
        else:
            show_training(settings, options)
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    except RanksFailedError as failed:
        print(explain(failed), file=sys.stderr)
        return 1
    return 0


def show_training(settings: Settings, options: argparse.Namespace) -> None:
    """Train with one algorithm."""
    with show_progress(settings.steps) as show:
        result: Result = run_ranks(train, options.nproc, (settings,), show)[0]
    print(table(result, options.nproc, settings.algorithm))
    found = dataclasses.asdict(result)
    conclude("loss curve", lambda path: draw_losses(result, path), found, settings, options)


def show_comparison(settings: Settings, options: argparse.Namespace) -> None:
    """Train with several algorithms over a slow link, and compare them."""
    backend = "nccl" if settings.device == "cuda" else settings.backend
    with open_slow_link(options.nproc, options.link, backend, options.paced) as link:
        print(f"{link}{link.reason and ' '}{link.reason}", flush=True)
        arguments = (settings, link, options.steps)
        with show_progress(options.steps or MOST_STEPS) as show:
            contests: list[Contest] = run_ranks(compare, options.nproc, arguments, show, link.network)[0]
    found = {
        "link_mbit_per_s": options.link,
        "link_made_by": link.made_by,
        "contests": [dataclasses.asdict(contest) for contest in contests],
    }
    print(comparison_table(contests, options.nproc, link))
    conclude("picture", lambda path: draw_comparison(contests, options.link, path), found, settings, options)


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="bagua demo",
        description="Train a byte-level language model on the source of Python's standard library, on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--nproc", type=positive, default=2, metavar="N", help="processes to start")
    add("--algorithm", type=named, metavar="NAME", help="train with this one only; without it, three are compared")
    add("--link", type=above_zero, default=100.0, metavar="X", help="Mbit/s of each process in a comparison")
    add("--paced", action="store_true", help="slow the link inside the processes also where the kernel could do it")
    add("--backend", metavar="NAME", help="what they communicate through: gloo, nccl, ...; None is the best there is")
    add("--steps", type=positive, metavar="N", help=f"optimizer steps; {defaults.steps}, or what fits into a minute")
    add("--batch-per-rank", type=positive, default=defaults.batch_per_rank, metavar="N", help="windows of text")
    add("--learning-rate", type=above_zero, default=defaults.learning_rate, metavar="X", help="the highest one")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of weights and batches")
    add("--timeout", type=some_seconds, default=defaults.timeout_s, metavar="S", help="to wait for another process")
    add("--plot", type=Path, default=Path("bagua-demo-loss.png"), metavar="FILE", help="where the loss curve goes")
    add(
        "--no-plot", action="store_const", const=None, dest="plot", default=argparse.SUPPRESS, help="draw no loss curve"
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers to this file as well")
    return parser


def named(text: str) -> str:
    """The name of an algorithm, by any of its names."""
    if text in (DECENTRALIZED, "DecentralizedDataParallel"):
        return DECENTRALIZED
    try:
        found = registry.get(text)
    except UnsupportedAlgorithmException as error:
        raise argparse.ArgumentTypeError(f"{error} Here there is {DECENTRALIZED}, too.") from None
    return next(name for name in registry if registry.get(name) is found)


def make_settings(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Settings:
    """Check what argparse cannot check by itself; ends the program with a message where something is wrong."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus = torch.cuda.device_count()
    if options.nproc > RANKS_PER_CORE * cores:
        parser.error(f"--nproc {options.nproc}: at most {RANKS_PER_CORE * cores}, {RANKS_PER_CORE} for each core here")
    if options.backend == "nccl" and options.nproc > gpus:
        parser.error(f"--backend nccl: --nproc {options.nproc} needs as many GPUs, this machine has {gpus}")
    for path in (options.plot, options.json):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    on_gpu = options.backend == "nccl" or (options.backend is None and gpus >= options.nproc)
    return Settings(
        algorithm=options.algorithm or CONTESTANTS[0][0],
        backend="gloo" if options.backend is None and gpus and not on_gpu else options.backend,
        device="cuda" if on_gpu else "cpu",
        steps=options.steps or Settings.steps,
        batch_per_rank=options.batch_per_rank,
        learning_rate=options.learning_rate,
        seed=options.seed,
        timeout_s=options.timeout,
        clip_norm=0.0 if options.algorithm == "qadam" else 1.0,  # qadam brings momenta into the gradients.
    )


def explain(failed: RanksFailedError) -> str:
    """The failures of all ranks, the cause first; a traceback only where the error is not one of bagua's own."""
    cause = failed.failures[0]
    lines = [str(failure) for failure in failed.failures]
    if cause.error is not None and not isinstance(cause.error, BaguaError):
        lines.insert(0, cause.trace.rstrip())
    return "\n".join([*lines, "all processes have ended"])


def conclude(
    picture: str,
    draw: Callable[[Path], bool],
    found: dict[str, object],
    settings: Settings,
    options: argparse.Namespace,
) -> None:
    """Draw the picture, write the numbers."""
    if options.plot is not None:
        drawn = draw(options.plot)
        print(f"{picture}: {options.plot}" if drawn else f"{picture}: not drawn; {install_command('plot')} adds it")
    if options.json is not None:
        numbers = {**dataclasses.asdict(settings), "world_size": options.nproc, **found}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
