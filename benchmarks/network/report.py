"""The lab's table, its JSON and its plot."""

import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.network.results import Line, Loss, Run, pays_up_to, rate_name
from benchmarks.paired import Comparison, Interval, readable

__all__ = ["draw", "read_json", "tables", "write_json"]

#: Where the plot puts links without a limit, in multiples of the highest rate.
BEYOND = 5.0


def tables(run: Run) -> str:
    """A table for each rate, and where each contender pays."""
    where = f"{run.hosts} hosts x {run.ranks_per_host} ranks" if run.ranks_per_host > 1 else f"{run.hosts} hosts"
    where += f", {run.delay_ms:g} ms each way" if run.delay_ms else ""
    texts = []
    for rate in sorted_rates(run.lines):
        lines = [line for line in run.lines if line.rate_mbit_s == rate]
        texts.append(f"{where}, {rate_name(rate)}, {run.task}; {run.rounds} rounds against {run.baseline}")
        texts += [heading(run.baseline, lines), *(row(line) for line in lines), ""]
    if len(sorted_rates(run.lines)) > 1:
        texts.append(f"Faster than {run.baseline} per step")
        for contender, lines in by_contender(run.lines):
            if contender != run.baseline:
                texts.append(f"  {contender:<46} {pays_up_to(lines)}")
        texts.append("")
    texts += [f"{contender} did not run: {reason}" for contender, reason in run.failures.items()]
    return "\n".join(texts)


def heading(baseline: str, lines: Sequence[Line]) -> str:
    """Names of the columns."""
    text = f"{'':<46} {'step':>9}  {': ' + baseline:<28} {'sent':>10} {': ' + baseline:>8}"
    losses = [line.loss for line in lines if line.loss is not None]
    if losses:
        text += f"   {'loss, ' + str(losses[0].steps) + ' steps':>15} {'loss, same time (steps)':>24}"
    return text


def row(line: Line) -> str:
    """One contender."""
    step = f"{line.step.result!s} {verdict(line.step.limit, line.step.verdict)}"
    text = (
        f"{line.contender:<46} {readable(line.step.candidate_s):>9}  {step:<28} "
        f"{line.sent_bytes / 1e6:>7.3f} MB {line.sent_ratio:>8.4f}"
    )
    if line.loss is not None:
        steps = f"({'>= ' if line.loss.capped else ''}{line.loss.steps_in_time})"
        text += f"   {line.loss.after_steps:>15.4f} {line.loss.after_time:>15.4f} {steps:>8}"
    sent = verdict(line.sent_limit, line.sent_verdict)
    return f"{text}  {'sent ' + sent if sent else ''}".rstrip()


def verdict(limit: float | None, text: str) -> str:
    """What is promised, and whether it is kept."""
    return "" if limit is None else f"<= {limit:g} {text}"


def sorted_rates(lines: Iterable[Line]) -> list[float | None]:
    """All rates, rising, without a limit last."""
    rates = {line.rate_mbit_s for line in lines}
    limited: list[float | None] = [*sorted(rate for rate in rates if rate is not None)]
    return limited + ([None] if None in rates else [])


def by_contender(lines: Iterable[Line]) -> list[tuple[str, list[Line]]]:
    """Lines of each contender, in the order in which they appear."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line.contender, []).append(line)
    return list(found.items())


def write_json(runs: Sequence[Run], path: Path) -> None:
    """Write all numbers, and what follows from them."""
    described = []
    for run in runs:
        lines = [
            {
                **asdict(line),
                "sent_ratio": line.sent_ratio,
                "verdict": line.step.verdict,
                "sent_verdict": line.sent_verdict,
            }
            for line in run.lines
        ]
        described.append({**asdict(run), "lines": lines})
    path.write_text(json.dumps({"runs": described}, indent=2) + "\n")


def read_json(paths: Sequence[Path]) -> list[Run]:
    """What earlier runs have written; those on equal hosts with equal task and baseline become one.

    A contender that was measured again at the same rate replaces what was there.
    """
    merged: dict[tuple[object, ...], Run] = {}
    for path in paths:
        for numbers in json.loads(path.read_text())["runs"]:
            lines = [read_line(line) for line in numbers["lines"]]
            run = Run(**{**numbers, "lines": lines})
            key = (run.hosts, run.ranks_per_host, run.delay_ms, run.task, run.baseline)
            merged[key] = add_runs(merged[key], run) if key in merged else run
    return list(merged.values())


def read_line(numbers: dict[str, object]) -> Line:
    """One line out of a file."""
    known = {name: value for name, value in numbers.items() if name in Line.__dataclass_fields__}
    step: dict[str, object] = dict(known["step"])  # type: ignore[call-overload]  # it is what asdict made
    for interval in ("result", "same"):
        step[interval] = Interval(**step[interval])  # type: ignore[arg-type]  # as above
    loss = None if known["loss"] is None else Loss(**known["loss"])  # type: ignore[arg-type]  # as above
    return Line(**{**known, "step": Comparison(**step), "loss": loss})  # type: ignore[arg-type]  # as above


def add_runs(first: Run, second: Run) -> Run:
    """Both in one."""
    lines = {(line.contender, line.rate_mbit_s): line for line in [*first.lines, *second.lines]}
    return replace(
        first,
        rounds=min(first.rounds, second.rounds),
        lines=list(lines.values()),
        failures={**first.failures, **second.failures},
    )


def draw(run: Run, path: Path) -> bool:
    """Draw step time against bandwidth, one line for each contender.

    Args:
        run: what was measured.
        path: where to write; the ending chooses the format.

    Returns:
        False, and nothing drawn, where matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib import colormaps  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    rates = sorted_rates(run.lines)
    limited = [rate for rate in rates if rate is not None]
    beyond = BEYOND * max(limited, default=1000.0)
    places = {rate: beyond if rate is None else rate for rate in rates}
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (contender, lines) in enumerate(by_contender(run.lines)):
        points = sorted((places[line.rate_mbit_s], 1e3 * line.step.candidate_s) for line in lines)
        is_baseline = contender == run.baseline
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=4,
            linewidth=2.5 if is_baseline else 1.2,
            color="black" if is_baseline else colormaps["tab20"](number % 20),
            label=contender,
        )
    axes.set(xscale="log", yscale="log", xlabel="rate of each host's link", ylabel="step, ms")
    axes.set_xticks(list(places.values()), [rate_name(rate) for rate in rates])
    axes.minorticks_off()
    axes.set_title(f"{run.hosts} hosts x {run.ranks_per_host}: {run.task}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    return True
