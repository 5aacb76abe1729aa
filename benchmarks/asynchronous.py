"""What a fast rank keeps of its pace beside a slow one: with asynchronous averaging, and with torch's DDP.

Two processes train the perceptron of ``benchmarks.training_step`` with batch 64. Rank 1 rests for twice as long as its
step took, so that it is three times as slow. Rank 0's steps are timed against its own steps without communication, in
turn; its background thread sleeps meanwhile. With ``--rate`` the ranks are two hosts whose links carry so many Mbit/s
(needs root), and both are fast.

``python -m benchmarks.asynchronous``
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import AsyncModelAverageAlgorithm
from bagua.cli.lab.network import open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import get_default_group
from bagua.link import LinkSettings
from benchmarks.network.ranks import Place
from benchmarks.paired import Comparison, Rounds, add_arguments, compare, conclude, measure
from benchmarks.training_step import HIDDEN, OUTER, multilayer_perceptron

TIMEOUT_S = 120.0
BATCH = 64
SLOWER = 3
STEPS_PER_SAMPLE = 32  # so long that it contains two or three averages
#: Not timed: the average for which rank 1 has waited while rank 0's thread slept.
STEPS_BEFORE = 4
#: Of a step alone: 0.97 of its pace.
LIMIT = 1 / 0.97
#: Processes keep what they free. Otherwise glibc returns the gradients of whichever model happens to lie on top of the
#: heap to the system in each ``zero_grad``, and 50 MB of page faults, 16 ms, are counted against that model.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}

Step = Callable[[], object]
Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]


def make_step(hidden: int, wrap: Wrap) -> tuple[Any, Step]:
    """The perceptron as ``wrap`` returns it, and a function that takes one step of it."""
    model = multilayer_perceptron(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped, inputs = wrap(model, optimizer), torch.randn(BATCH, OUTER)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    return wrapped, step


def slowly(step: Step) -> None:
    """The same step, ``SLOWER`` times as long."""
    started = time.perf_counter()
    step()
    time.sleep((SLOWER - 1) * (time.perf_counter() - started))


def time_averaging(rank: Rank, place: Place | None, hidden: int, rounds: int) -> Rounds | None:
    """Steps of rank 0 without and with averaging, while rank 1 takes steps with averaging."""
    rank.join(None, TIMEOUT_S) if place is None else place.join(rank)
    store = get_default_group().store
    _, step_alone = make_step(hidden, lambda module, _: module)
    averaging = AsyncModelAverageAlgorithm()
    model, step = make_step(hidden, lambda module, optimizer: bagua.with_bagua(module, optimizer, averaging))
    averager: Any = model.bagua_algorithm._averager  # noqa: SLF001 - no user has a reason to stop it
    pace_s, slept_at = averager._pace_s, 0.0  # noqa: SLF001

    def alone() -> None:
        nonlocal slept_at
        if averager._pace_s == pace_s:  # noqa: SLF001
            averager._pace_s, slept_at = TIMEOUT_S, time.monotonic()  # noqa: SLF001
        step_alone()

    def together() -> None:
        if averager._pace_s != pace_s:  # noqa: SLF001
            averager._pace_s = pace_s  # noqa: SLF001
            averager._averaged_at += time.monotonic() - slept_at  # noqa: SLF001 - intervals go on where they stood
            averager._wake.set()  # noqa: SLF001
        step()

    timed = None
    if rank.rank == 0:
        timed = measure(alone, together, rounds=rounds, calls=STEPS_PER_SAMPLE, settle=STEPS_BEFORE)
        together()
        store.set("measured", "")
        print(f"averages: {bagua.metrics()['comm/averages']:.0f}", file=sys.stderr)
    while rank.rank == 1 and not store.check(["measured"]):
        step() if place else slowly(step)
    model.bagua_algorithm.abort(model)
    bagua.destroy_process_group()
    return timed


def time_ddp(rank: Rank, place: Place | None, hidden: int, rounds: int) -> Rounds:
    """Steps of rank 0 without communication and under DDP."""
    rank.join("gloo", TIMEOUT_S) if place is None else place.join(rank)
    _, alone = make_step(hidden, lambda module, _: module)
    _, together = make_step(hidden, lambda module, _: nn.parallel.DistributedDataParallel(module))

    def late() -> None:
        slowly(alone)
        together()

    candidate = late if rank.rank == 1 and place is None else together
    timed = measure(alone, candidate, rounds=rounds, before_each=torch.distributed.barrier)
    bagua.destroy_process_group()
    return timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.asynchronous", description=__doc__)
    add_arguments(parser, rounds=20)
    parser.add_argument("--hidden", type=int, default=HIDDEN, metavar="N", help="width of the hidden layers")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="of the links between two hosts, in Mbit/s")
    options = parser.parse_args(arguments)
    os.environ.update(MALLOC)
    lines: list[Comparison] = []
    with nullcontext() if options.rate is None else open_network(2) as network:
        if network is not None:
            network.set_rates(LinkSettings(options.rate, options.rate))
        place = None if network is None else Place(network)
        where = f"beside a rank {SLOWER} x slower" if place is None else f"2 hosts, {options.rate:g} Mbit/s"
        for name, function, limit in (("async", time_averaging, LIMIT), ("DDP", time_ddp, None)):
            rounds = 3 if place and name == "DDP" else options.rounds
            timed = run_ranks(function, 2, (place, options.hidden, rounds), network=network)[0]
            lines.append(compare(f"{where}: {name} : alone", timed, limit))
    return conclude(lines, options, {})


if __name__ == "__main__":
    sys.exit(main())
