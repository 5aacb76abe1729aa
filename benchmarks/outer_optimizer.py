"""How the outer optimizer of ``diloco`` should follow ``sync_every``: a grid of rates and momenta, on thread ranks.

Each cell trains a small byte-level model on Python's standard library, with Adam inside, from the same weights on the
same batches as gradient allreduce with as many ranks. Reported is the held-out loss over that of gradient allreduce,
an average over seeds. ``guarded`` measures the cosine of successive mean differences, and keeps the gain of
Nesterov momentum along them below 1.5, by a smaller momentum first and a smaller rate then; a choice that is made while
training would have to come within half a per cent of the best cell of its row.

``python -m benchmarks.outer_optimizer``

Results (2026-11-22): 4 ranks, 2,048 steps, Adam at the rate that suits gradient allreduce best, mean of two seeds. A
star marks what ``diloco`` chooses by itself. A period of 256 steps has only eight outer steps. ``local_sgd`` is 1.034
for a period of 4 steps and 1.059 for 64.

| ``outer_lr``, ``outer_momentum`` | 4 steps | 16 steps | 64 steps | 256 steps |
|---|---|---|---|---|
| 0.7, 0.3 | 1.037 | 1.043 | 1.061 | 1.080 |
| 1.0, 0.3 | 1.011 | 1.019 | 1.034 | 1.054 |
| 0.7, 0.6 | 1.009* | 1.010* | 1.032 | 1.055 |
| 1.0, 0.6 | 1.017 | 1.036 | 1.025* | 1.056* |
| 0.7, 0.9 | 1.385 | 1.188 | 1.151 | 1.153 |
| 1.0, 0.9 | 1.520 | 1.395 | 1.214 | 1.196 |
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bagua.comm
from bagua.algorithms import Algorithm, DiLoCoAlgorithm, Outer
from bagua.cli.demo import Text, read_standard_library
from bagua.parallel import with_bagua
from bagua.testing import ThreadRanks
from benchmarks.network.text import CONTEXT, NextByte, loss_at

#: Torch has one global generator, and ranks are threads.
_seeding = threading.Lock()
BASELINE = "gradient_allreduce"
GUARDED = "guarded"
#: The largest way along a difference, over that of a plain mean, that the guard allows.
LARGEST_GAIN = 1.5
#: How near to the best cell a choice must come to be offered.
WITHIN = 1.005
BATCH = 16
HELD_OUT_WINDOWS = 4096
DEADLINE_S = 600.0


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([one.flatten() for one in tensors])


class Guarded(torch.optim.Optimizer):
    """Nesterov momentum that measures how far successive gradients have one direction, and goes less far then.

    Args:
        params: that it steps.
        lr: learning rate.
        momentum: where successive gradients have nothing in common.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002 - as in torch
        """Step once."""
        group = self.param_groups[0]
        parameters: list[Tensor] = group["params"]
        momentum = gain_below(LARGEST_GAIN, group["lr"], group["momentum"], self.cosine(parameters))
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            kept = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
            kept.mul_(momentum[1]).add_(parameter.grad)
            parameter.sub_(parameter.grad.add(kept, alpha=momentum[1]), alpha=momentum[0])
            state.setdefault("before", torch.empty_like(parameter)).copy_(parameter.grad)

    def cosine(self, parameters: Sequence[Tensor]) -> float:
        """Between the gradients and those before, smoothed; 0 as long as there are none."""
        before = [self.state[parameter].get("before") for parameter in parameters]
        if before[0] is None:
            return 0.0
        now = [parameter.grad for parameter in parameters if parameter.grad is not None]
        found = float(nn.functional.cosine_similarity(_flat(now), _flat(before), dim=0))
        smoothed = self.state[parameters[0]].get("cosine")
        found = found if smoothed is None else 0.5 * (found + float(smoothed))
        for parameter in parameters:
            self.state[parameter]["cosine"] = torch.tensor(found)
        return found


def gain_below(limit: float, rate: float, momentum: float, cosine: float) -> tuple[float, float]:
    """A rate and a momentum whose gain ``rate * (1 + m / (1 - m * cosine))`` is at most ``limit``."""
    cosine = max(0.0, cosine)
    if rate >= limit:
        return limit, 0.0
    excess = limit / rate - 1  # What m / (1 - m * cosine) may be.
    return rate, min(momentum, excess / (1 + excess * cosine))


def train(text: Text, algorithm: Algorithm, steps: int, rate: float, seed: int) -> float:
    """The held-out loss of the model that all ranks end with, on one rank of several."""
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NextByte()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    wrapped: Any = with_bagua(model, [optimizer], algorithm)
    generator = torch.Generator().manual_seed(1 + bagua.comm.get_rank() + 1000 * seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
        starts = torch.randint(len(text.training) - CONTEXT - 1, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss_at(wrapped, text.training, starts).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    wrapped.bagua_finish()
    starts = torch.linspace(0, len(text.held_out) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
    with torch.no_grad():
        return float(loss_at(model, text.held_out, starts))


def cells(every: Sequence[int], rates: Sequence[float], momenta: Sequence[float]) -> dict[tuple[int, str], Algorithm]:
    """What is trained, by ``sync_every`` and a name."""
    found: dict[tuple[int, str], Algorithm] = {}
    for steps in every:
        for momentum in momenta:
            for rate in rates:
                made = DiLoCoAlgorithm(steps, outer_lr=rate, outer_momentum=momentum)
                found[steps, f"{rate:g}, {momentum:g}"] = made
        found[steps, GUARDED] = DiLoCoAlgorithm(steps, outer=Outer(Guarded, lr=0.7, momentum=0.9))
    return found


def measure(options: argparse.Namespace) -> dict[tuple[int, str], list[float]]:
    """Losses over those of the baseline, by seed, of each cell."""
    text, pool = read_standard_library(), ThreadRanks(options.ranks, deadline_s=DEADLINE_S)
    grid = cells(options.every, options.rates, options.momenta)
    ratios: dict[tuple[int, str], list[float]] = {key: [] for key in grid}
    for seed in range(options.seeds):
        settings = options.steps, options.inner_rate, seed
        baseline = pool.run(train, text, Algorithm.init(BASELINE), *settings)[0]
        print(f"seed {seed}: {BASELINE} ends at {baseline:.4f}", file=sys.stderr)
        for key, algorithm in grid.items():
            ratios[key].append(pool.run(train, text, algorithm, *settings)[0] / baseline)
    return ratios


def show(ratios: dict[tuple[int, str], list[float]], every: Sequence[int]) -> None:
    """Print a row for each ``sync_every``, and how near the guard came."""
    names = list(dict.fromkeys(name for _, name in ratios))
    print(f"{'rate, momentum':>14} " + " ".join(f"H={steps:<6}" for steps in every))
    for name in names:
        print(f"{name:>14} " + " ".join(f"{statistics.mean(ratios[steps, name]):<8.4f}" for steps in every))
    for steps in every:
        row = {name: statistics.mean(ratios[steps, name]) for name in names}
        best = min((value, name) for name, value in row.items() if name != GUARDED)
        near = row[GUARDED] / best[0]
        verdict = "near enough" if near <= WITHIN else "NOT near enough"
        print(f"H={steps}: the best is {best[1]} with {best[0]:.4f}; guarded is {near:.4f} times that, {verdict}")


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.outer_optimizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="N", help="default 4")
    add("--steps", type=int, default=2048, metavar="N", help="of each rank; default 2048")
    add("--seeds", type=int, default=2, metavar="N", help="default 2")
    add("--every", type=int, nargs="+", default=[4, 16, 64, 256], metavar="H", help="default 4 16 64 256")
    add("--inner-rate", type=float, default=1e-2, metavar="LR", help="of Adam, the best one for the baseline")
    add("--rates", type=float, nargs="+", default=[0.7, 1.0], metavar="LR", help="default 0.7 1.0")
    add("--momenta", type=float, nargs="+", default=[0.3, 0.6, 0.9], metavar="M", help="default 0.3 0.6 0.9")
    add("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 0."""
    options = make_parser().parse_args(arguments)
    torch.set_num_threads(1)
    begun = time.monotonic()
    ratios = measure(options)
    print(f"held-out loss over that of {BASELINE}, {options.ranks} ranks, {options.steps} steps, {options.seeds} seeds")
    show(ratios, options.every)
    print(f"({time.monotonic() - begun:.0f} s)", file=sys.stderr)
    if options.json is not None:
        numbers = {f"{steps}: {name}": values for (steps, name), values in ratios.items()}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
