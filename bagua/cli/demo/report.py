"""What the demo shows: progress while it trains, a table and a picture at the end."""

import contextlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bagua.checks import install_command
from bagua.cli.demo.comparison import Contest
from bagua.cli.demo.shaping import SlowLink
from bagua.cli.demo.training import LAST_STEPS, Phase, Result, TrainingProgress

PLAIN_LINES = 20


#: Takes what rank 0 reports.
Show = Callable[[object], None]


@contextlib.contextmanager
def show_progress(steps: int) -> Iterator[Show]:
    """Show what rank 0 reports: a bar on a terminal if rich is installed, otherwise a line now and then.

    Args:
        steps: how many steps there will be.
    """
    on_terminal = sys.stdout.isatty()
    if on_terminal and importlib.util.find_spec("rich") is not None:
        with _bar(steps) as show:
            yield show
        return
    if on_terminal:
        print(f"({install_command('cli')} adds a progress bar)")
    yield _lines(steps)


def _lines(steps: int) -> Show:
    every = max(1, steps // PLAIN_LINES)

    def show(report: object) -> None:
        if isinstance(report, Phase):
            print(report.name, flush=True)
        if isinstance(report, TrainingProgress) and (report.step % every == 0 or report.step == steps):
            print(f"step {report.step:>5}/{steps}  {progress_text(report)}", flush=True)

    return show


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Show]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    shown = TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn()
    with Progress(*shown, TimeRemainingColumn(), TextColumn("{task.fields[numbers]}")) as bar:
        task = bar.add_task("starting", total=steps, numbers="")

        def show(report: object) -> None:
            if isinstance(report, Phase):
                bar.update(task, description=report.name)
            if isinstance(report, TrainingProgress):
                bar.update(task, completed=report.step, numbers=progress_text(report))

        yield show


def progress_text(progress: TrainingProgress) -> str:
    """One step in a few words."""
    learned = f"loss {progress.loss:.3f}  {progress.tokens_per_s:,.0f} tokens/s"
    return f"{learned}  {progress.sent_bytes / 1e6:.2f} MB sent  {progress.exposed:.0%} waiting"


def table(result: Result, world_size: int, algorithm: str) -> str:
    """The final numbers, a line each.

    Args:
        result: rank 0's.
        world_size: how many ranks trained.
        algorithm: how they communicated.
    """
    fallen = 1 - result.last_loss / result.first_loss
    last_steps = min(LAST_STEPS, len(result.losses))
    alone = world_size * result.solo_tokens_per_s
    agreement = "bit for bit" if result.disagreement == 0 else f"up to {result.disagreement:.2g}"
    rows = [
        ("model", f"{result.parameters:,} parameters; text from {result.files} files, a tenth held out"),
        ("ranks", f"{world_size}, {algorithm} through {result.backend}"),
        ("first training loss", f"{result.first_loss:.3f} nats per byte"),
        ("final training loss", f"{result.last_loss:.3f}, {fallen:.0%} lower (mean of the last {last_steps} steps)"),
        ("held-out loss", f"{result.held_out_loss:.3f} (files that were not trained on)"),
        ("throughput", f"{result.tokens_per_s:,.0f} tokens/s (median step, all ranks)"),
        ("one process alone", f"{result.solo_tokens_per_s:,.0f} tokens/s (plain model, timed before and after)"),
        ("scaling efficiency", f"{result.tokens_per_s / alone:.0%} of {world_size} x one process alone"),
        ("sent per step", f"{result.sent_bytes_per_step / 1e6:.2f} MB by each rank"),
        ("ranks agree", agreement),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def comparison_table(contests: Sequence[Contest], world_size: int, link: SlowLink) -> str:
    """A line for each algorithm, and what it means."""
    first = contests[0]
    rows = [("", "time", "step", "sent per step", "loss at the end", "held-out loss")]
    for contest in contests:
        result = contest.result
        rows.append(
            (
                contest.algorithm,
                f"{sum(contest.seconds):.1f} s",
                f"{contest.step_s * 1e3:.0f} ms",
                f"{result.sent_bytes_per_step / 1e6:.2f} MB",
                f"{result.last_loss:.3f}",
                f"{result.held_out_loss:.3f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    faster = [f"{one.algorithm} in {one.step_s / first.step_s:.0%} of the time" for one in contests[1:]]
    trained_by = "1 process" if world_size == 1 else f"{world_size} processes"
    return "\n".join(
        [
            f"the same {len(first.seconds)} steps of {trained_by} through {link}:",
            *(f"  {line}" for line in lines),
            f"{first.algorithm} does what torch DDP does; {', '.join(faster)}",
        ]
    )


def draw_comparison(contests: Sequence[Contest], mbit_per_s: float, path: Path) -> bool:
    """Draw the losses of all algorithms against the seconds that they took; see ``draw_losses``."""

    def plot(axes: Any) -> None:
        for contest in contests:
            axes.plot(list(itertools.accumulate(contest.seconds)), contest.result.losses, label=contest.algorithm)
        axes.set(xlabel="seconds", ylabel="training loss, nats per byte")
        axes.set_title(f"The same steps at {mbit_per_s:g} Mbit/s")

    return _draw(path, plot)


def draw_losses(result: Result, path: Path) -> bool:
    """Draw the loss curve into a file.

    Args:
        result: rank 0's.
        path: file to write; the ending chooses the format.

    Returns:
        False, and nothing drawn, where matplotlib is not installed.
    """

    def plot(axes: Any) -> None:
        axes.plot(range(1, len(result.losses) + 1), result.losses, linewidth=0.8, label="training (rank 0)")
        axes.axhline(result.held_out_loss, color="tab:orange", linestyle="--", label="held-out files, at the end")
        axes.set(xlabel="step", ylabel="loss, nats per byte")
        axes.set_title("Learning Python's standard library, byte by byte")

    return _draw(path, plot)


def _draw(path: Path, plot: Callable[[Any], None]) -> bool:
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    plot(axes)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
