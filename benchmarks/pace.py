"""Islands that train each at its own pace: what all do together, over the sum of what each does alone, and the loss.

``python -m benchmarks.pace`` forks four members of this host, of which one is slower, and trains a small byte-level
model twice until all have trained on as many windows: with ``pace="own"`` and with ``pace="equal"``. Steps are paced by
sleeping, so that two cores suffice; what each does alone is measured as well, four at a time. A rate is that of all
steps after the first outer step, at which paces are told. It may be 0.95 at least, and the loss 1.01 at most.

With one member three times slower, each made 98 % of the steps that it makes alone, and 40 % with ``pace="equal"``.
After as many windows of text the loss was 2 % lower (2026-11-25).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.cli.baguarun import main as baguarun
from benchmarks.network.tasks import text_of_this_process
from benchmarks.network.text import CONTEXT, NextByte, loss_at
from tests.membership.forked_islands import fork

__all__ = ["main"]

MEMBERS, SYNC_EVERY, BATCH, RATE, HELD_OUT_WINDOWS = 4, 30, 32, 3e-3, 8192
LEAST_RATE, MOST_LOSS = 0.95, 1.01


class Trainer:
    """One member's model and data, with steps that take ``pace_s`` seconds."""

    def __init__(self, share: int, seed: int, pace_s: float) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model: Any = NextByte()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01, fused=True)
        self.text, self.pace_s, self.steps = text_of_this_process(), pace_s, 0
        self.generator = torch.Generator().manual_seed(1 + share + 1000 * seed)

    def step(self) -> None:
        """One step."""
        end = time.monotonic() + self.pace_s
        starts = torch.randint(len(self.text.training) - CONTEXT, (BATCH,), generator=self.generator)
        self.optimizer.zero_grad()
        loss: Any = loss_at(self.model, self.text.training, starts)
        loss.backward()
        time.sleep(max(0.0, end - time.monotonic()))
        self.optimizer.step()
        self.steps += 1

    def held_out_loss(self) -> float:
        """Nats per byte of other files."""
        text = self.text.held_out
        with torch.no_grad():
            return float(loss_at(self.model, text, torch.linspace(0, len(text) - CONTEXT - 1, HELD_OUT_WINDOWS).long()))


def alone(share: int, pace_s: float, seconds: float) -> None:
    """Train without the others; print steps per second as JSON."""
    trainer = Trainer(share, 0, pace_s)
    trainer.step()
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        trainer.step()
    os.write(1, json.dumps((trainer.steps - 1) / (time.monotonic() - begun)).encode())


def member(where: str, pace: str, periods: int, share: int, pace_s: float, seed: int) -> None:
    """Train with the others; print own steps, when the first outer step and the last were over, and the loss."""
    trainer = Trainer(share, seed, pace_s)
    last, first = periods * SYNC_EVERY, (0, 0.0)
    with bagua.join_islands(where, size=MEMBERS, name=f"{pace}{seed}", timeout=120.0) as islands:
        algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=SYNC_EVERY, pace=pace)
        model = trainer.model.with_bagua(trainer.optimizer, algorithm, between=islands)
        while model.bagua_step < last:
            # The same on all members at each outer step, whatever their numbers of steps are.
            trainer.optimizer.param_groups[0]["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * model.bagua_step / last))
            islands.count_tokens(BATCH)
            trainer.step()
            if model.bagua_step == SYNC_EVERY:
                first = trainer.steps, time.time()
    told = {"steps": trainer.steps, "first": first, "end": time.time(), "loss": trainer.held_out_loss()}
    os.write(1, json.dumps(told).encode())


def together(jobs: Sequence[partial[None]]) -> list[Any]:
    """What each of the processes has printed."""
    found = []
    for process, reader in [fork(job) for job in jobs]:
        with os.fdopen(reader) as output:
            found.append(json.loads(output.read()))
        os.waitpid(process, 0)
    return found


def trained(where: str, pace: str, periods: int, paces_s: Sequence[float], seed: int) -> tuple[float, int, float]:
    """Steps of all per second after the first outer step, steps of all, and the loss of the model they have."""
    found = together([partial(member, where, pace, periods, one, pace_s, seed) for one, pace_s in enumerate(paces_s)])
    elapsed_s = max(one["end"] for one in found) - max(one["first"][1] for one in found)
    steps = sum(one["steps"] for one in found)
    return (steps - sum(one["first"][0] for one in found)) / elapsed_s, steps, found[0]["loss"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6000, help="steps of all members together, about")
    parser.add_argument("--pace", type=float, default=0.03, help="seconds of a step")
    parser.add_argument("--slower", type=float, default=3.0, help="how many times slower the last member is")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of training alone")
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args(arguments)
    paces_s = [chosen.pace] * (MEMBERS - 1) + [chosen.pace * chosen.slower]
    each = {"own": sum(max(1, round(SYNC_EVERY * chosen.pace / one)) for one in paces_s), "equal": MEMBERS * SYNC_EVERY}
    server, reader = fork(lambda: baguarun(["--serve-islands", "127.0.0.1:0"]))
    try:
        where = os.read(reader, 1000).decode().split()[3].rstrip(".")
        rates = together([partial(alone, share, pace_s, chosen.seconds) for share, pace_s in enumerate(paces_s)])
        print(f"alone: {', '.join(f'{one:.1f}' for one in rates)} steps/s", flush=True)
        losses: dict[str, list[float]] = {}
        for pace, seed in [(pace, seed) for seed in range(chosen.seeds) for pace in each]:
            rate, steps, loss = trained(where, pace, max(2, round(chosen.steps / each[pace])), paces_s, seed)
            losses.setdefault(pace, []).append(loss)
            print(f"pace={pace!r}, seed {seed}: {rate / sum(rates):.3f} of the steps alone; "
                  f"{steps} steps, held-out loss {loss:.4f}", flush=True)  # fmt: skip
    finally:
        os.kill(server, signal.SIGTERM)
        os.waitpid(server, 0)
    ratios = [own / equal for own, equal in zip(losses["own"], losses["equal"], strict=True)]
    print(f"loss, own over equal: {statistics.mean(ratios):.4f} ({', '.join(f'{one:.4f}' for one in ratios)}); "
          f"limits: {LEAST_RATE} of the steps at least, {MOST_LOSS} of the loss at most")  # fmt: skip


if __name__ == "__main__":
    main()
