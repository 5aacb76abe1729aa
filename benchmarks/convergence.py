"""What communicating less costs in loss: two tasks with every registered algorithm, from several seeds.

Each contender trains a small language model of bytes (``--task text``), or a convolutional network on generated
images of which each rank sees other classes (``--task images``), from the same weights on the same batches, and so does
gradient allreduce. Reported is the held-out loss over that of gradient allreduce from the same seed (for those that
need an optimizer of their own: over that of gradient allreduce with it, or with Adam, at the rate that suits it best;
for DiLoCo with a codec or in fragments: over that of DiLoCo without; for ``sparse_loco`` whose density is named: over
that of DiLoCo with the same schedule), for each seed and on an average.
Two lines say how much that means: ``perturbed`` is gradient allreduce whose first weights differ by one per cent, so
its distance from 1 is chance; ``silent`` is the mutant that drops the exchange, and a limit that it kept would prove
nothing.

All ranks are processes of this machine, and each counts as a host of its own, so that hierarchical forms do not end in
plain averaging over shared memory.

``python -m benchmarks.convergence``

The language model has 20,000 parameters. Four fifths of a rank's images come from two of eight classes. Learning rates
rise for a tenth of the steps, then fall to a hundredth. ``RECIPES`` has rates and warm-ups, which seed 5 chose.

Results of algorithms that exchange in each step (2026-11-23): the mean of the seeds 30 to 32, which chose no setting,
``--first-seed 30 --steps 1500`` with ``--task text`` and ``--task images``. All but ``bytegrad`` on text meet their
limits.

| contender | text | images |
|---|---|---|
| ``perturbed`` | 0.999 | 0.999 |
| ``bytegrad`` | 1.007 | 1.000 |
| ``qadam`` | 1.000 | 1.002 |
| ``power_sgd`` | 1.016 | 0.997 |
| ``one_bit_adam`` | 1.006 | 1.001 |
| ``one_bit_lamb`` | 1.018 | 1.000 |
| ``loco`` | 1.006 | 1.003 |
| ``dion`` | 1.000 | 0.998 |
| ``sign_sgd`` | 1.015 | 1.000 |
| ``top_k`` | 1.017 | 0.992 |
| ``decentralized``, ``shift_one`` | 1.008 | 0.995 |
| ``decentralized``, ``all`` | 1.009 | 0.997 |
| ``low_precision_decentralized`` | 1.009 | 0.998 |
| ``silent`` | 1.108 | 1.480 |

Chance is as large as many of these differences: ``dion`` computes what its baseline computes, and came on text to 1.010
from seed 30, and to 0.995 from seed 31. Without an exact beginning, ``sign_sgd`` with blocks of 2,048 came to 1.146,
and ``top_k`` with 1 % to 1.204: worse than ranks that exchange nothing.

Results of local updates (docs/local_updates.md, 2026-11-24): the mean of three seeds, ``--first-seed 30 --steps 1500``
with ``--task text`` and ``--task images``, and ``--contenders diloco:sync_every=20,lr=0.03,start_after=450 ...``. They
meet their limits. Text has AdamW, 256 windows in a rank's batch, and ``RECIPES``, but ``start_after=600`` in
``local_sgd`` and ``slowmo`` with a period of 100 steps. Images have SGD, ``fragment_order="bytes"``, and the rate 0.05;
it is 0.03 for a period of 100 steps and for ``slowmo``.

``sparse_loco`` sends one element in 128: ``sync_every=30``, ``kept=32``, ``average="all"``, ``hierarchical=False``, and
is compared with ``diloco`` with ``sync_every=30``, ``outer_lr=1.0`` and the same ``start_after`` (2026-11-24). Between
two hosts, the kernel counted 0.006 MB for each step, with headers.

| error feedback | text, ``start_after=900`` | images, 900 | images, 450 |
|---|---|---|---|
| ``error_feedback="weights"`` | 1.008 | 0.997 | 0.995 |
| ``error_feedback=0.8``, on images 0.9 | 1.014 | 1.000 | 1.001 |
| a single mean at the end | 1.010 | 0.999 | 1.143 |
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from bagua import comm
from bagua.algorithms import Algorithm
from bagua.cli.launch import Rank, RanksFailedError, run_ranks
from bagua.comm.store.serving import connect_store
from bagua.errors import ConfigurationError
from benchmarks.network.__main__ import a_contender, at_least, termination_as_interrupt
from benchmarks.network.contenders import Prepared, every_algorithm, find_maker, read_options, split_options
from benchmarks.network.experiment import show
from benchmarks.network.images import ImageTask
from benchmarks.network.ranks import Training, report
from benchmarks.network.tasks import Task
from benchmarks.network.text import NextByteTask

TIMEOUT_S = 120.0
BASELINE = "gradient_allreduce"
PERTURBED = "benchmarks.convergence:perturbed"
PERTURBATION = 1e-2
MUTANT = "silent"
#: What a contender is compared with, where that is not ``BASELINE``.
BASELINES = {
    "qadam": "adam",
    "one_bit_adam": "adam",
    "one_bit_lamb": "lamb",
    "dion": "dion_optimizer",
}
#: How they take part in a task where nobody says otherwise: with the rate that ends lowest, chosen on the seed 5, and
#: with a beginning in proportion to all steps.
RECIPES: dict[str, dict[str, str]] = {
    "text": {
        "adam": "lr=0.03",
        "lamb": "lr=0.02",
        "dion_optimizer": "lr=0.05",
        "qadam": "lr=0.03,warmup_steps={fifth}",
        "one_bit_adam": "lr=0.03,warmup_steps={fifth}",
        "one_bit_lamb": "lr=0.02,warmup_steps={fifth}",
        "dion": "lr=0.05",
        "sign_sgd": "lr=0.03,warmup_steps={fifth}",
        "top_k": "lr=0.03,warmup_steps={fifth}",
        "sparse_loco": "lr=0.03,start_after={three_fifths}",
        "local_sgd": "sync_every=20,lr=0.03,start_after={three_fifths}",
        "slowmo": "sync_every=20,lr=0.03,start_after={three_tenths}",
        "diloco": "sync_every=20,lr=0.03,start_after={three_tenths}",
    },
    "images": {
        "adam": "lr=0.006",
        "lamb": "lr=0.01",
        "dion_optimizer": "lr=0.02",
        "qadam": "lr=0.006,warmup_steps={fifth}",
        "one_bit_adam": "lr=0.006,warmup_steps={fifth}",
        "one_bit_lamb": "lr=0.01,warmup_steps={fifth}",
        "dion": "lr=0.02",
        "sign_sgd": "lr=0.05,warmup_steps={fifth}",
        "top_k": "warmup_steps={fifth}",
    },
}
#: The largest loss over the baseline's that is promised.
LIMITS = {
    "bytegrad": 1.005,
    **dict.fromkeys(("qadam", "one_bit_adam", "one_bit_lamb", "dion", "loco"), 1.02),
    **dict.fromkeys(("power_sgd", "sign_sgd", "top_k", "sparse_loco"), 1.02),
    **dict.fromkeys(("decentralized", "low_precision_decentralized"), 1.03),
}
LOCAL = ("local_sgd", "slowmo", "diloco")
#: Of local updates, by the least steps from one exchange to the next.
LIMITS_BY_PERIOD = ((100, 1.03), (0, 1.01))
#: Of DiLoCo with one of these options over DiLoCo without.
LIMITS_OF_FORMS: dict[str, Callable[[object], float]] = {
    "codec": lambda codec: 1.01 if codec == "int2" else 1.005,
    "fragments": lambda _: 1.01,
}
#: Of sparse outer gradients over DiLoCo.
LIMIT_OF_SPARSE = 1.01
#: Options that DiLoCo is compared without.
OF_FORMS = ("codec", "error_feedback", "fragments", "fragment_order", "overlap", "blend", "mix")
TASKS: dict[str, Callable[[int, int, int], Task]] = {
    "text": lambda steps, seed, batch: NextByteTask(steps=steps, batch=64 * batch, seed=seed),
    "images": lambda steps, seed, batch: ImageTask(steps=steps, batch=4 * batch, seed=seed),
}
#: The mutant must break the tightest of them.
MUTANT_LIMIT = 1.005
LEAST_STEPS = 500
LEAST_SEEDS = 3
LEAST_FALL = 0.3
INTERRUPTED = 130


def perturbed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
    """Gradient allreduce from weights that differ by about one per cent."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))
    return find_maker(BASELINE)(model, optimizer)


@dataclass(frozen=True)
class Ended:
    """How training from one seed ended.

    Args:
        first_loss: held out, before the first step.
        last_loss: held out, after the last step; mean over ranks.
    """

    first_loss: float
    last_loss: float


@dataclass(frozen=True)
class Line:
    """One contender.

    Args:
        contender: who.
        baseline: whose loss it is compared with.
        losses: at the end, by seed.
        ratios: of these over the baseline's, by seed.
        limit: what is promised of their mean; None where nothing is.
        must_fail: whether the limit has to be broken.
    """

    contender: str
    baseline: str
    losses: list[float]
    ratios: list[float]
    limit: float | None = None
    must_fail: bool = False

    @property
    def mean(self) -> float:
        """Of the ratios over seeds."""
        return statistics.mean(self.ratios)

    @property
    def verdict(self) -> str:
        """Whether the limit does what it has to."""
        if self.limit is None:
            return ""
        if self.must_fail:
            return "broken, as it must be" if self.mean > self.limit else "NOT BROKEN"
        return "met" if self.mean <= self.limit else "MISSED"

    def __str__(self) -> str:
        ratios = " ".join(f"{ratio:.4f}" for ratio in self.ratios)
        limit = "" if self.limit is None else f"{self.limit:g} {self.verdict}"
        return (
            f"{self.contender:<48} {statistics.mean(self.losses):>8.4f}  {self.mean:>8.4f}  {ratios}  {limit}".rstrip()
        )


def train_all(
    rank: Rank, contenders: Sequence[str], task: str, steps: int, batch_per_rank: int, seed: int
) -> tuple[dict[str, Ended], dict[str, str]]:
    """Train one contender after the other from the same seed; also why some cannot run with so many ranks."""
    comm.init_process_group(
        backend="gloo",
        timeout=timedelta(seconds=TIMEOUT_S),
        store=connect_store(rank.port, TIMEOUT_S),
        rank=rank.rank,
        world_size=rank.world_size,
        local_world_size=1,
    )
    ended: dict[str, Ended] = {}
    refusals: dict[str, str] = {}
    for contender in contenders:
        try:
            training = Training(TASKS[task](steps, seed, batch_per_rank), contender, rank.rank)
        except ConfigurationError as error:  # which every rank finds alike
            refusals[contender] = str(error)
            continue
        first_loss = training.held_out_loss()
        training.prepared.resume()
        training.take_steps(steps)
        training.prepared.finish()
        ended[contender] = Ended(first_loss, training.held_out_loss())
        report(rank, f"seed {seed}, {contender}: {first_loss:.3f} -> {ended[contender].last_loss:.4f}")
    comm.destroy_process_group()
    return ended, refusals


def with_recipe(name: str, task: str, steps: int) -> str:
    """The form in which a contender that is only named takes part."""
    parts = {"fifth": 0.2, "three_tenths": 0.3, "three_fifths": 0.6}
    beginnings = {word: max(1, round(part * steps)) for word, part in parts.items()}
    recipe = RECIPES[task].get(name, "").format(**beginnings)
    return f"{name}:{recipe}" if recipe else name


def baseline_of(contender: str, task: str) -> str:
    """What a contender is compared with: at its own best rate."""
    name, _, rest = contender.partition(":")
    if is_of_density(contender):
        options, of_optimizer = split_options(name, read_options(rest))
        declared = Algorithm.init(name, **options)
        schedule = {key: getattr(declared, key) for key in ("sync_every", "start_after")}
        return "diloco:" + ",".join(f"{key}={value!r}" for key, value in {**schedule, **of_optimizer}.items())
    options = read_options(rest) if name == "diloco" else {}
    if not options.keys().isdisjoint(OF_FORMS):
        kept = ",".join(f"{key}={value!r}" for key, value in options.items() if key not in OF_FORMS)
        return f"diloco:{kept}" if kept else name
    return with_recipe(BASELINES.get(name, BASELINE), task, 0)


def is_of_density(contender: str) -> bool:
    """Whether a contender is ``sparse_loco`` with a density of its own choice, not the recipe."""
    name, _, rest = contender.partition(":")
    return name == "sparse_loco" and "kept" in read_options(rest)


def limit_of(contender: str) -> float | None:
    """What is promised of a contender; None where nothing is."""
    if contender == MUTANT:
        return MUTANT_LIMIT
    if is_of_density(contender):
        return LIMIT_OF_SPARSE
    name, _, rest = contender.partition(":")
    if name not in LOCAL:
        return LIMITS.get(name)
    options, _ = split_options(name, read_options(rest))
    forms = [limit(options[key]) for key, limit in LIMITS_OF_FORMS.items() if name == "diloco" and key in options]
    if forms:
        return max(forms)
    period = Algorithm.init(name, **options).sync_every  # type: ignore[attr-defined]  # those in LOCAL have it
    return next(limit for least, limit in LIMITS_BY_PERIOD if period >= least)


def make_lines(contenders: Sequence[str], by_seed: Sequence[dict[str, Ended]], task: str) -> list[Line]:
    """Compare everyone who ended with their baselines."""
    lines = []
    for contender in contenders:
        if contender not in by_seed[0]:
            continue
        baseline = baseline_of(contender, task)
        losses = [ended[contender].last_loss for ended in by_seed]
        ratios = [loss / ended[baseline].last_loss for loss, ended in zip(losses, by_seed, strict=True)]
        lines.append(Line(contender, baseline, losses, ratios, limit_of(contender), contender == MUTANT))
    return lines


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=at_least(2), default=4, metavar="N", help="default 4")
    add("--steps", type=at_least(1), default=LEAST_STEPS, metavar="N", help="at least 500 to judge")
    add("--seeds", type=at_least(1), default=LEAST_SEEDS, metavar="N", help="at least 3 to judge")
    add("--first-seed", type=at_least(0), default=0, metavar="N", help="the others follow it; default 0")
    add("--task", choices=TASKS, default="text", help="default text")
    add(
        "--batch-per-rank",
        type=at_least(1),
        default=4,
        metavar="N",
        help="64 windows of text or 4 images each; default 4",
    )
    add(
        "--contenders",
        type=a_contender,
        nargs="+",
        metavar="WHO",
        help="default: all registered algorithms; a name without options takes the options that suit the task",
    )
    add("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser


def everyone(chosen: Sequence[str] | None, task: str, steps: int) -> list[str]:
    """Who has to train: the chosen ones, what they are compared with, and the two lines that say what it means."""
    wanted = [with_recipe(name, task, steps) for name in chosen or every_algorithm()]
    baselines = [baseline_of(contender, task) for contender in wanted]
    return list(dict.fromkeys([BASELINE, PERTURBED, MUTANT, *baselines, *wanted]))


def conclude(lines: Sequence[Line], fall: float, refusals: dict[str, str], options: argparse.Namespace) -> int:
    """Print and write everything; return the exit status."""
    title = f"held-out loss of {options.task} after {options.steps} steps"
    print(f"{title:<48} {'loss':>8}  {': base':>8}  by seed")
    for line in lines:
        print(line)
    for contender, reason in refusals.items():
        print(f"{contender} did not run: {reason}")
    print(f"{BASELINE}: the loss fell by {fall:.0%}")
    judged = options.steps >= LEAST_STEPS and options.seeds >= LEAST_SEEDS and fall >= LEAST_FALL
    if not judged:
        print(f"(not judged: that takes {LEAST_STEPS} steps, {LEAST_SEEDS} seeds and a fall of {LEAST_FALL:.0%})")
    if options.json is not None:
        numbers = [{**dataclasses.asdict(line), "mean": line.mean, "verdict": line.verdict} for line in lines]
        described = {name: getattr(options, name) for name in ("task", "ranks", "steps", "first_seed", "seeds")}
        described |= {"fall": fall, "lines": numbers}
        options.json.write_text(json.dumps(described, indent=2) + "\n")
    return int(judged and any(line.verdict in ("MISSED", "NOT BROKEN") for line in lines))


def measure(contenders: Sequence[str], options: argparse.Namespace) -> tuple[list[dict[str, Ended]], dict[str, str]]:
    """Train everyone from every seed."""
    by_seed, refusals = [], {}
    run: Callable[..., list[tuple[dict[str, Ended], dict[str, str]]]] = run_ranks
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        arguments = (contenders, options.task, options.steps, options.batch_per_rank, seed)
        ended, refused = run(train_all, options.ranks, arguments, show)[0]
        by_seed.append(ended)
        refusals.update(refused)
    return by_seed, refusals


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status.

    Args:
        arguments: of the command line.

    Returns:
        0; 1 when a limit was missed, or kept by the mutant, in a run that can judge, or when ranks failed; 130 when
        interrupted.
    """
    options = make_parser().parse_args(arguments)
    contenders = everyone(options.contenders, options.task, options.steps)
    try:
        with termination_as_interrupt():
            by_seed, refusals = measure(contenders, options)
    except RanksFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return INTERRUPTED
    ends = [ended[BASELINE] for ended in by_seed]
    fall = 1 - statistics.mean(end.last_loss / end.first_loss for end in ends)
    return conclude(make_lines(contenders, by_seed, options.task), fall, refusals, options)


if __name__ == "__main__":
    sys.exit(main())
