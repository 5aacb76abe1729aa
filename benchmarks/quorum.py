"""Members that train each at its own pace: what all do together, over the sum of what each does alone.

``python -m benchmarks.quorum`` forks four processes of this host, of which one is slower, and prints one line for each
way to exchange. Steps are paced by sleeping, so that two cores suffice; what each does alone is measured as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.cli.baguarun import main as baguarun
from tests.membership.forked_islands import fork

__all__ = ["main"]

#: What is measured: options of ``diloco`` by the name of the way.
WAYS: dict[str, dict[str, Any]] = {
    "quorum of one, grace": {"quorum": 1},
    "quorum of one, no grace": {"quorum": 1, "grace": 0.0},
    "quorum of all": {"quorum": 4, "grace": 0.0},
}
MEMBERS = 4


def steps_in(seconds: float, pace_s: float, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many steps a member makes in so many seconds, each with ``pace_s`` of sleep."""
    data, count, end = torch.randn(4, 64), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(pace_s)
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        count += 1
    return count


def member(where: str, name: str, options: dict[str, Any] | None, pace_s: float, seconds: float) -> None:
    """Train alone, or with the others; print what was done as JSON."""
    torch.set_num_threads(1)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if options is None:
        steps, merges = steps_in(seconds, pace_s, model, optimizer), []
    else:
        with bagua.join_islands(where, size=MEMBERS, minimum=1, name=name, timeout=60) as islands:
            algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=8, fragments=4, overlap=2, **options)
            model.with_bagua(optimizer, algorithm, between=islands)
            steps = steps_in(seconds, pace_s, model, optimizer)
            merges = [len(one.seats) for one in islands.tape()]
            model.bagua_finish()
    os.write(1, json.dumps({"steps": steps, "merges": merges}).encode())


def together(where: str, name: str, options: dict[str, Any] | None, paces_s: Sequence[float], seconds: float) -> Any:
    """What each member has done."""
    started = [fork(partial(member, where, name, options, pace_s, seconds)) for pace_s in paces_s]
    found = []
    for process, reader in started:
        with os.fdopen(reader) as output:
            found.append(json.loads(output.read()))
        os.waitpid(process, 0)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of training for each way")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of a step")
    parser.add_argument("--slower", type=float, default=3.0, help="how many times slower the last member is")
    chosen = parser.parse_args(arguments)
    paces_s = [chosen.pace] * (MEMBERS - 1) + [chosen.pace * chosen.slower]
    server, reader = fork(lambda: baguarun(["--serve-islands", "127.0.0.1:0"]))
    try:
        where = os.read(reader, 1000).decode().split()[3].rstrip(".")
        alone = [one["steps"] for one in together(where, "", None, paces_s, chosen.seconds)]
        print(f"alone: {alone} steps in {chosen.seconds:g} s")
        for way, options in WAYS.items():
            found = together(where, way.replace(" ", "-"), options, paces_s, chosen.seconds)
            steps, merges = [one["steps"] for one in found], found[0]["merges"]
            ratio = sum(steps) / sum(alone)
            print(f"{way}: {ratio:.3f} of the steps alone, {steps}; {len(merges)} merges, "
                  f"of {sum(merges) / max(len(merges), 1):.2f} differences each", flush=True)  # fmt: skip
    finally:
        os.kill(server, signal.SIGTERM)
        os.waitpid(server, 0)


if __name__ == "__main__":
    main()
