"""The command ``bagua demo``: a small language model, trained on a few processes over a slow link, three times."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua import comm
from bagua.algorithms import Algorithm, registry
from bagua.checks import install_command
from bagua.cli.arguments import above_zero, positive
from bagua.cli.lab.network import LabUnavailableError, Network, open_network
from bagua.cli.launch import Rank, RanksFailedError, run_ranks
from bagua.errors import BaguaError, UnsupportedAlgorithmException
from bagua.link import LinkSettings, usable_cores
from bagua.testing import RankDiedError

#: What is compared, with options: the exact mean, the same in 8 bits, and weights that are averaged now and then.
CONTESTANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gradient_allreduce", {}),
    ("bytegrad", {}),
    ("local_sgd", {"sync_every": 8}),
)
#: The first contestant, which is the slowest, gets about so long, in a multiple of the local steps.
BUDGET_S, FEWEST_STEPS, MOST_STEPS, TRIAL_STEPS = 18.0, 16, 120, 3
PICTURE = "bagua-demo-loss.png"
LAST_STEPS, HELD_OUT_WINDOWS, TIMEOUT_S, RANKS_PER_CORE = 20, 256, 60.0, 4
#: Test suites are packaged separately by some distributions; without them every machine sees much the same text.
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Bytes of Python's standard library to train on, and of every tenth file, held out; uint8."""

    training: Tensor
    held_out: Tensor


def read_standard_library(folder: Path | None = None) -> Text:
    """Read all Python files of a folder, the running interpreter's library by default, in the order of their names.

    Raises:
        FileNotFoundError: there are fewer than ten Python files.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    paths = sorted(path for path in root.rglob("*.py") if not SKIPPED & set(path.relative_to(root).parts[:-1]))
    if len(paths) < 10:
        raise FileNotFoundError(f"the demo trains on the Python files in {root}, but found {len(paths)} there")
    parts = [path for number, path in enumerate(paths, start=1) if number % 10], paths[9::10]
    joined = (bytearray(b"\n".join(path.read_bytes() for path in part)) for part in parts)
    return Text(*(torch.frombuffer(content, dtype=torch.uint8) for content in joined))


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Windows of ``context`` bytes of ``text``, and the same one byte later; int64 ``[batch, context]``."""
    piece = text[starts[:, None] + torch.arange(context + 1)].long()
    return piece[:, :-1], piece[:, 1:]


class ByteTransformer(nn.Module):
    """Predicts each next byte of a text from those before it; called with inputs and targets, it returns the loss."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:  # So small that the untrained model takes all bytes for equally likely.
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats per byte; both are int64 ``[batch, context]``."""
        hidden = self.blocks(self.bytes(inputs) + self.positions.weight, mask=self.mask, is_causal=True)
        logits = nn.functional.linear(hidden, self.bytes.weight)  # The embedding serves as the output layer, too.
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Settings:
    """One training: an algorithm by its name and options, the number of steps, and what the model learns by."""

    algorithm: str = "gradient_allreduce"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = MOST_STEPS
    batch_per_rank: int = 8
    learning_rate: float = 2e-3
    seed: int = 0
    shape: Mapping[str, int] = field(default_factory=dict)


class Trainer:
    """A model with its optimizer and learning rates; ranks with another ``share`` draw other windows of ``text``."""

    def __init__(self, settings: Settings, text: Tensor, share: int) -> None:
        self.settings, self.text = settings, text
        self.generator = torch.Generator().manual_seed(settings.seed + 1 + share)
        torch.manual_seed(settings.seed)
        self.model: Any = ByteTransformer(**settings.shape)
        self.context = self.model.context
        kind: Any = registry.get(settings.algorithm).optimizer_class or torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=settings.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate_at)

    def rate_at(self, step: int) -> float:
        """The share of the highest learning rate: a line up, then half a cosine down to a tenth."""
        rising = (step + 1) / (self.settings.steps // 10 + 1)
        return min(rising, 0.55 + 0.45 * math.cos(math.pi * step / self.settings.steps))

    def distribute(self) -> None:
        """From now on, train together with the other ranks. Collective."""
        algorithm = Algorithm.init(self.settings.algorithm, **self.settings.options)
        self.model = bagua.with_bagua(self.model, self.optimizer, algorithm)

    def step(self) -> float:
        """Train on one batch, and return its loss."""
        last = len(self.text) - self.context
        starts = torch.randint(last, (self.settings.batch_per_rank,), generator=self.generator)
        loss = self.model(*windows(self.text, starts, self.context))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(loss.item())

    @torch.no_grad()
    def held_out_loss(self, text: Tensor, count: int = HELD_OUT_WINDOWS) -> float:
        """Nats per byte on evenly spaced windows, the same for every seed."""
        starts = torch.linspace(0, len(text) - self.context - 1, count).long()
        self.model.eval()
        losses = [self.model(*windows(text, part, self.context)).item() for part in torch.split(starts, 16)]
        self.model.train()
        return statistics.fmean(losses)


@dataclass(frozen=True)
class Result:
    """How one training went, as rank 0 knows it; losses are nats per byte, the last two means over ranks."""

    algorithm: str
    losses: list[float]
    seconds: list[float]
    sent_bytes_per_step: float
    last_loss: float
    held_out_loss: float

    @property
    def step_s(self) -> float:
        """Seconds of a step, exchanges that come now and then included."""
        return statistics.fmean(self.seconds)


def compare(rank: Rank, settings: Sequence[Settings], steps: int | None) -> list[Result]:
    """Train with each of ``settings``, one after the other; None gives as many steps as fit into the demo's time."""
    tell = rank.report if rank.rank == 0 else lambda _: None
    rank.join("gloo" if rank.host is not None else None, TIMEOUT_S)
    text, why = read_standard_library(), "as --steps says"
    sizes = (f"{len(part) / 1e6:.1f} MB" for part in (text.training, text.held_out))
    tell("read the text, the source of Python's standard library: {} to train on, {} held out".format(*sizes))
    if steps is None:
        tell(f"trying how many steps fit into {BUDGET_S:g} s")
        trial = Trainer(Settings(steps=MOST_STEPS), text.training, rank.rank)
        trial.distribute()
        took = torch.tensor([statistics.median(_timed(trial.step)[1] for _ in range(2 * TRIAL_STEPS))])
        bagua.broadcast(took, 0)
        trial.model.bagua_close()
        steps = max(FEWEST_STEPS, min(MOST_STEPS, int(BUDGET_S / float(took)))) // 8 * 8
        why = f"about as many as fit, at least {FEWEST_STEPS} and at most {MOST_STEPS}"
    tell(f"each run ends after {steps} steps, {why}")
    results = []
    for number, one in enumerate(settings, start=1):
        trainer = Trainer(replace(one, steps=steps), text.training, rank.rank)
        trainer.distribute()
        tell(f"run {number} of {len(settings)}: {one.algorithm}, {steps} steps")
        results.append(_train(tell, trainer, text.held_out))
    bagua.destroy_process_group()
    return results


def _timed(step: Callable[[], float]) -> tuple[float, float]:
    started = time.perf_counter()
    return step(), time.perf_counter() - started


def _train(tell: Callable[[object], None], trainer: Trainer, held_out: Tensor) -> Result:
    settings = trainer.settings
    before, every, steps = _sent_bytes(), max(1, settings.steps // 4), []
    for number in range(1, settings.steps + 1):
        steps.append(_timed(trainer.step))
        if number % every == 0:
            tell(f"  step {number}: loss {steps[-1][0]:.3f}, {steps[-1][1] * 1e3:.0f} ms")
    tell(f"  ended: all {settings.steps} steps are made; computing the loss on the held-out text")
    sent = _sent_bytes() - before
    losses, seconds = map(list, zip(*steps, strict=True))
    if registry.get(settings.algorithm)().in_background:
        trainer.model.bagua_algorithm.abort(trainer.model)
    trainer.model.bagua_finish()
    means = torch.tensor([statistics.fmean(losses[-LAST_STEPS:]), trainer.held_out_loss(held_out)])
    bagua.allreduce(means, op=comm.ReduceOp.AVG)
    trainer.model.bagua_close()
    return Result(settings.algorithm, losses, seconds, sent / settings.steps, *means.tolist())


def _sent_bytes() -> int:
    return sum(entry.sent_bytes for entry in comm.stats().values())


@contextmanager
def slow_link(ranks: int, mbit_per_s: float) -> Iterator[tuple[Network | None, str, str]]:
    """Hosts with a slow link for each rank, None where there can be no lab; words for the links; why they are so."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(open_network(ranks, LinkSettings(mbit_per_s, mbit_per_s)))
        except LabUnavailableError as error:
            yield None, "links as fast as this machine", f", because {error}"
        else:
            said = f" ({network.shortcoming})" if network.shortcoming else ""
            yield network, f"links of {mbit_per_s:g} Mbit/s", said


def table(results: Sequence[Result], trained_by: str, where: str, mbit_per_s: float) -> str:
    """What it means, and a line for each algorithm."""
    first, on_wire = results[0], f"sent per step, at {mbit_per_s:g} Mbit/s"
    rows = [("", "time", "step", on_wire, "loss at the end", "held-out loss")]
    for one in results:
        sent = f"{one.sent_bytes_per_step / 1e6:.2f} MB, {one.sent_bytes_per_step * 8 / mbit_per_s / 1e3:.0f} ms"
        times = f"{sum(one.seconds):.1f} s", f"{one.step_s * 1e3:.0f} ms"
        rows.append((one.algorithm, *times, sent, f"{one.last_loss:.3f}", f"{one.held_out_loss:.3f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    said = [f"the same {len(first.losses)} steps of {trained_by}, over {where}:", *(f"  {line}" for line in lines)]
    faster = " and ".join(f"{one.algorithm} takes {one.step_s / first.step_s:.0%}" for one in results[1:])
    answer = [f"Of the time of {first.algorithm}, which does what torch DDP does, {faster}."] if faster else []
    return "\n".join([*answer, *said])


def draw(results: Sequence[Result], where: str) -> str:
    """Draw the losses against the seconds that they took; says into which file, or why not."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"not drawn; {install_command('plot')} adds it"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes: Any = figure.add_subplot()
    for one in results:
        axes.plot(list(itertools.accumulate(one.seconds)), one.losses, label=one.algorithm)
    axes.set(xlabel="seconds", ylabel="training loss, nats per byte", title=f"The same steps over {where}")
    axes.legend()
    axes.grid(alpha=0.3)
    try:
        figure.savefig(PICTURE, dpi=120)
    except OSError as error:
        return f"not drawn; {error}"
    return PICTURE


def named(text: str) -> str:
    """The name of an algorithm, by any of its names."""
    try:
        found = registry.get(text)
    except UnsupportedAlgorithmException as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return next(name for name in registry if registry.get(name) is found)


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    about = "Train a byte-level language model on the source of Python's standard library, on this machine."
    parser = argparse.ArgumentParser(prog="bagua demo", description=about)
    add = parser.add_argument
    add("--nproc", type=positive, default=2, metavar="N", help="processes to start; default 2")
    add("--algorithm", type=named, metavar="NAME", help="train with this one only; without it, three are compared")
    slow = "Mbit/s of each process; slowing links needs root; default 100"
    add("--link", type=above_zero, default=100.0, metavar="X", help=slow)
    add("--steps", type=positive, metavar="N", help="optimizer steps of each; default: what fits into a minute")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and say how it went.

    Args:
        arguments: words that follow ``bagua demo`` on the command line.

    Returns:
        The exit status: 0, or 1 when a rank failed. Bad arguments exit with 2.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    most = RANKS_PER_CORE * usable_cores()
    if options.nproc > most:
        parser.error(f"--nproc {options.nproc}: at most {most}, {RANKS_PER_CORE} for each core here")
    trained_by = "1 process" if options.nproc == 1 else f"{options.nproc} processes"
    contest = CONTESTANTS if options.algorithm is None else ((options.algorithm, {}),)
    settings = [Settings(name, given) for name, given in contest]
    try:
        with slow_link(options.nproc, options.link) as (network, where, why):
            print(f"starting {trained_by}, with {where}{why}", flush=True)
            show = lambda said: print(said, flush=True)  # noqa: E731 - a name for what is passed on
            results: list[Result] = run_ranks(compare, options.nproc, (settings, options.steps), show, network)[0]
    except RanksFailedError as failed:
        cause = failed.failures[0]
        known = isinstance(cause.error, BaguaError | RankDiedError)
        traces = [] if known else [cause.trace.rstrip()]
        print("\n".join([*traces, *failed.descriptions, "all processes have ended"]), file=sys.stderr)
        return 1
    print("\n" + table(results, trained_by, where, options.link))
    print(f"picture: {draw(results, where)}")
    print("next: baguarun --nproc 2 train.py runs a script of yours; docs/first_script.md says what it needs")
    return 0
