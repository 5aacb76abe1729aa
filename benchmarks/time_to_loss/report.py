"""Tables and a picture of what a folder holds."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bagua.algorithms import registry
from bagua.link import parse_link
from benchmarks.time_to_loss.folder import ALONE, Folder
from benchmarks.time_to_loss.measuring import SHAPE, Trained
from benchmarks.time_to_loss.reaching import (
    Segment,
    first_below,
    loss_after,
    segments,
    split,
    steps_within,
    target,
    time_of,
)

__all__ = ["BASELINE", "Line", "Question", "Report", "draw"]

BASELINE = "ddp"
COLUMNS = ("by seed", "steps", "a step", "sent", "loss : wanted", "in the time of ddp", "lr", "copies", "whole")
#: Of those that are drawn.
NAMES = {
    "accelerate": "Accelerate, LocalSGD",
    "ddp": "torch DDP",
    "ddp_fp16": "torch DDP, float16",
    "ddp_powersgd": "torch DDP, PowerSGD",
    "decent_dp": "decent-dp",
    "post_local_sgd": "torch, PostLocalSGD",
    "torchft_diloco": "torchft, DiLoCo",
    "torchft_local_sgd": "torchft, LocalSGD",
}
RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0)
#: Of the two ways to find a time: they differ by no more where the second one proves the first.
AGREEMENT = 0.05


@dataclass(frozen=True)
class Question:
    """What all cells of a table have in common.

    Args:
        hosts: how many, each with one rank.
        steps: number of steps of a contender that names none.
        rates: highest learning rates to choose from.
        tuning_seed: on which they are chosen.
        seeds: which are reported.
        shape: options of the transformer.
    """

    hosts: int = 2
    steps: int = 400
    rates: tuple[float, ...] = (125e-6, 25e-5, 5e-4)
    tuning_seed: int = 5
    seeds: tuple[int, ...] = (0, 1)
    shape: str = SHAPE

    def trained(self, contender: str, lr: float, seed: int) -> Trained:
        """One training of a contender."""
        return Trained(*split(contender, self.steps), lr, seed, self.shape)

    def settings(self, trained: Trained) -> dict[str, object]:
        """What names the cell of a training."""
        return {**asdict(trained), "hosts": self.hosts}


@dataclass(frozen=True)
class Line:
    """One contender on one link.

    Args:
        contender: who.
        lr: the learning rate that suits it best.
        steps: to the loss that is wanted, by seed; None where it was not reached.
        seconds: the same in time.
        whole_s: the same from a training that was measured whole, by seed.
        step_s: mean time of its steps, over all that lead to the loss; of all steps where none do.
        sent_bytes: of one host in a step, after the beginning.
        last_loss: over that which is wanted, at the end of the training; mean over seeds.
        timely_loss: the same after the time in which ``ddp`` reaches the loss that is wanted.
        copies: of the weights, in memory, beyond plain training.
        disturbed: whether other processes had cores while its steps were timed.
    """

    contender: str
    lr: float
    steps: list[float | None]
    seconds: list[float | None]
    whole_s: list[float | None]
    step_s: float
    sent_bytes: float
    last_loss: float
    timely_loss: float | None
    copies: float | None
    disturbed: bool

    @property
    def mean_s(self) -> float | None:
        """Of the seconds, over seeds; None where one did not reach the loss."""
        found = [one for one in self.seconds if one is not None]
        return statistics.mean(found) if found and len(found) == len(self.seconds) else None

    @property
    def disagreement(self) -> float | None:
        """How far a whole training is from what losses by steps and times of steps say: the worst seed."""
        both = zip(self.seconds, self.whole_s, strict=True)
        found = [abs(whole / told - 1) for told, whole in both if told is not None and whole is not None]
        return max(found) if found else None


class Report:
    """Answers from the cells of a folder.

    Args:
        folder: cells.
        question: which of them belong together.
    """

    def __init__(self, folder: Folder, question: Question) -> None:
        self.folder, self.question = folder, question

    def curve(self, contender: str, lr: float, seed: int, link: str = "") -> dict[int, float] | None:
        """Held-out losses by steps; None if they are not known."""
        settings = self.question.settings(self.question.trained(contender, lr, seed))
        cell = self.folder.find("whole", {**settings, "link": link}) if link else self.folder.find("losses", settings)
        return {int(stop): loss for stop, loss in cell.result["held_out"].items()} if cell and cell.result else None

    def best_rate(self, contender: str) -> float | None:
        """The rate with which the loss is reached first on the tuning seed, else ends lowest; None if nothing ended."""
        wanted = self.wanted(self.question.tuning_seed) if contender != BASELINE else 0.0
        found = []
        for lr in self.question.rates:
            curve = self.curve(contender, lr, self.question.tuning_seed)
            if curve is not None and not math.isnan(last := curve[max(curve)]):
                found.append((first_below(curve, wanted) or math.inf, last, lr))
        return min(found)[-1] if found else None

    def wanted(self, seed: int) -> float:
        """The loss that is wanted from a seed.

        Raises:
            LookupError: full gradients were not trained from it.
        """
        rate = self.best_rate(BASELINE)
        curve = None if rate is None else self.curve(BASELINE, rate, seed)
        if curve is None:
            raise LookupError(f"{BASELINE} was not trained from the seed {seed}: measure losses first")
        return target(curve)

    def step_times(self, contender: str, link: str) -> list[tuple[Segment, float]]:
        """Median times of steps, by segment.

        Raises:
            LookupError: one of them is not known, or could not be measured.
        """
        found = []
        for segment in segments(split(contender, 0)[0]):
            cell = self.folder.find("paces", pace_settings(segment.contender, self.question, link))
            if cell is None or not cell.result:
                raise LookupError(f"{segment.contender} on {link}: {cell.error if cell else 'was not timed'}")
            found.append((segment, statistics.median(cell.result["step_s"])))
        return found

    def line(self, contender: str, link: str) -> Line:
        """What is known of a contender on a link.

        Raises:
            LookupError: something that it takes is not known, or could not be measured.
        """
        rate, times = self.best_rate(contender), self.step_times(contender, link)
        if rate is None:
            raise LookupError(f"{contender}: was not trained from the seed {self.question.tuning_seed}")
        steps: list[float | None] = []
        ends, timely, whole = [], [], []
        for seed in self.question.seeds:
            curve, wanted = self.curve(contender, rate, seed), self.wanted(seed)
            if curve is None:
                raise LookupError(f"{contender}: was not trained from the seed {seed}")
            steps.append(first_below(curve, wanted))
            ends.append(curve[max(curve)] / wanted)
            timely.append(loss_after(curve, steps_within(self.time_of_baseline(seed, link), times)) / wanted)
            whole.append(self.whole_s(contender, rate, seed, link))
        seconds = [None if one is None else time_of(one, times) for one in steps]
        own = split(contender, self.question.steps)[1]
        last = self.folder.find("paces", pace_settings(times[-1][0].contender, self.question, link))
        copies = self.folder.find("memory", {"contender": times[-1][0].contender, "hosts": self.question.hosts})
        plain = self.folder.find("memory", {"contender": "plain", "hosts": self.question.hosts})
        assert last is not None
        return Line(
            contender,
            rate,
            steps,
            seconds,
            whole,
            time_of(own, times) / own,
            last.result["sent_bytes"],
            statistics.mean(ends),
            statistics.mean(timely),
            copies.result["copies"] - plain.result["copies"] if copies and copies.result and plain else None,
            last.others > ALONE,
        )

    def time_of_baseline(self, seed: int, link: str) -> float:
        """Seconds in which full gradients reach the loss that is wanted."""
        rate = self.best_rate(BASELINE)
        curve = None if rate is None else self.curve(BASELINE, rate, seed)
        steps = None if curve is None else first_below(curve, self.wanted(seed))
        assert steps is not None
        return time_of(steps, self.step_times(BASELINE, link))

    def whole_s(self, contender: str, lr: float, seed: int, link: str) -> float | None:
        """Seconds to the loss that is wanted in a training that was measured whole."""
        settings = self.question.settings(self.question.trained(contender, lr, seed))
        cell = self.folder.find("whole", {**settings, "link": link})
        curve = self.curve(contender, lr, seed, link)
        steps = None if curve is None else first_below(curve, self.wanted(seed))
        if cell is None or steps is None:
            return None
        seconds = {int(stop): value for stop, value in cell.result["seconds"].items()}
        return loss_after({0: 0.0, **seconds}, steps)

    def lines(self, contenders: Sequence[str], link: str) -> tuple[list[Line], list[str]]:
        """Lines of a link, the quickest first, and why others have none."""
        found, missing = [], []
        for contender in dict.fromkeys((BASELINE, *contenders)):
            try:
                found.append(self.line(contender, link))
            except LookupError as error:
                missing.append(str(error))
        return sorted(found, key=lambda line: math.inf if line.mean_s is None else line.mean_s), missing

    def table(self, contenders: Sequence[str], link: str) -> str:
        """Everything about one link, in Markdown."""
        lines, missing = self.lines(contenders, link)
        base = next((line.mean_s for line in lines if line.contender == BASELINE), None)
        rows = [
            f"{self.question.hosts} hosts, {link}",
            "",
            f"| contender | time : {BASELINE} | seconds | {' | '.join(COLUMNS)} |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(row(line, base) for line in lines),
            "",
        ]
        return "\n".join([*rows, *(f"{reason}\n" for reason in missing)])

    def summary(self, contenders: Sequence[str], links: Sequence[str]) -> dict[str, dict[str, Line]]:
        """The best line of us, and of each peer, by link; of those that reach the loss."""
        best: dict[str, dict[str, Line]] = {}
        for link in links:
            for line in self.lines(contenders, link)[0]:  # the quickest first
                if line.mean_s is not None:
                    best.setdefault(family(line.contender), {}).setdefault(link, line)
        return best

    def summary_table(self, contenders: Sequence[str], links: Sequence[str]) -> str:
        """The same in Markdown: time over that of full gradients, and who it is."""
        best = self.summary(contenders, links)
        rows = [f"| time : {BASELINE} | " + " | ".join(links) + " |", "|---" * (1 + len(links)) + "|"]
        for name, of_links in best.items():
            cells = [ratio_cell(of_links.get(link), best.get(BASELINE, {}).get(link)) for link in links]
            rows.append(f"| {name} | " + " | ".join(cells) + " |")
        return "\n".join(rows) + "\n"


def pace_settings(contender: str, question: Question, link: str) -> dict[str, object]:
    """What names the cell of a time of steps."""
    return {"contender": contender, "hosts": question.hosts, "link": link, "shape": question.shape}


def family(contender: str) -> str:
    """Ours are one; of others, the name without options."""
    name = split(contender, 0)[0].partition(":")[0]
    return "bagua" if name in (*registry, "decentralized_data_parallel", "ddp_8bit") else name


def ratio_cell(line: Line | None, base: Line | None) -> str:
    """Time over that of full gradients."""
    if line is None or line.mean_s is None or base is None or base.mean_s is None:
        return ""
    who = f" `{line.contender}`" if family(line.contender) == "bagua" else ""
    return f"{line.mean_s / base.mean_s:.3f}{who}"


def row(line: Line, base: float | None) -> str:
    """One contender."""
    ratio = f"{line.mean_s / base:.3f}" if line.mean_s is not None and base else "not reached"
    steps = ", ".join("-" if one is None else f"{one:.0f}" for one in line.steps)
    by_seed = ", ".join("-" if one is None else f"{one:.1f}" for one in line.seconds)
    mark = " (others had the cores)" if line.disturbed else ""
    disagreement = line.disagreement
    whole = "" if disagreement is None else f"{disagreement:.1%}{'' if disagreement <= AGREEMENT else ' TOO FAR'}"
    cells = (
        f"`{line.contender}`",
        ratio,
        "" if line.mean_s is None else f"{line.mean_s:.1f}",
        by_seed,
        steps,
        f"{1e3 * line.step_s:.0f} ms{mark}",
        f"{line.sent_bytes / 1e6:.3f} MB",
        f"{line.last_loss:.4f}",
        "" if line.timely_loss is None else f"{line.timely_loss:.4f}",
        f"{line.lr:g}",
        "" if line.copies is None else f"{line.copies:.2f}",
        whole,
    )
    return "| " + " | ".join(cells) + " |"


def link_name(link: str) -> str:
    """As people write a rate."""
    settings = parse_link(link)
    mbit_s = settings.send_mbit_s or math.inf
    rate = f"{mbit_s:g} Mbit/s" if mbit_s < 1000 else f"{mbit_s / 1000:g} Gbit/s"
    return f"{rate}, {settings.delay_ms:g} ms" if settings.delay_ms else rate


def draw(best: dict[str, dict[str, Line]], links: Iterable[str], path: Path) -> bool:
    """Draw time to the loss over that of full gradients against the link; False where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # noqa: PLC0415  # an extra

    ordered = sorted(links, key=lambda link: parse_link(link).send_mbit_s or math.inf)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, of_links in best.items():
        pairs = [(link, of_links.get(link), best[BASELINE].get(link)) for link in ordered]
        points = {
            link: line.mean_s / base.mean_s
            for link, line, base in pairs
            if line and base and line.mean_s and base.mean_s
        }
        axes.plot(
            [ordered.index(link) for link in points],
            list(points.values()),
            marker="o",
            linewidth=3 if name == "bagua" else 1.2,
            color="black" if name == BASELINE else None,
            label=NAMES.get(name, name),
        )
    axes.set(yscale="log", xlabel="link of each host", ylabel="time to the loss, over that of torch DDP")
    axes.set_xticks(range(len(ordered)), map(link_name, ordered))
    axes.set_yticks(RATIOS, map(str, RATIOS))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True
