"""Two islands with a folder between them: ``python -m benchmarks.bucket``.

* One exchange, an allreduce of a contribution that both members enter together, and the same through Gloo on loopback.
* ``--period 100``: steps of ``diloco`` whose exchange goes on beside training, and steps that exchange nothing.

Both run in turn, in the same two processes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time

import torch

from bagua.algorithms.local.diloco import DiLoCoAlgorithm
from bagua.comm import get_default_group, group_of_seats, open_store, solo_group
from bagua.membership import join_islands
from bagua.parallel import with_bagua
from bagua.testing import ProcessRanks


def measure(folder: str, megabytes: float, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of each exchange, through the folder and through Gloo, on one of the ranks."""
    gloo = get_default_group()
    rank = gloo.global_communicator.rank
    store = open_store(f"file://{folder}", 60.0)
    bucket = group_of_seats(store, range(2), rank, "epoch1", backend="bucket", timeout_s=60.0, meet_s=60.0)
    contribution = torch.ones(int(megabytes * 1e6 / 4))
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs + 2):
        for times, group in zip(found, (bucket, gloo), strict=True):
            gloo.global_communicator.barrier()
            started = time.perf_counter()
            group.global_communicator.allreduce(contribution)
            if number >= 2:  # Those before warm up.
                times.append(time.perf_counter() - started)
    bucket.close()
    return found


def take_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, steps: int) -> float:
    """Seconds of so many steps."""
    started = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return time.perf_counter() - started


def measure_steps(
    folder: str, megabytes: float, pairs: int, period: int, codec: str | None
) -> tuple[list[float], list[float]]:
    """Seconds of each period with an exchange, and of as many steps without any, on one of the ranks."""
    barrier = get_default_group().global_communicator.barrier
    width = round(math.sqrt(megabytes * 1e6 / 4 / 8))
    made = [torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))) for _ in range(2)]
    ours, theirs = ((model, torch.optim.SGD(model.parameters(), lr=1e-4)) for model in made)
    data = torch.randn(32, width)
    alone = solo_group()
    found: tuple[list[float], list[float]] = ([], [])
    with join_islands(f"file://{folder}", 2, process_group=alone) as islands:
        algorithm = DiLoCoAlgorithm(period, overlap=period // 2, codec=codec, error_feedback=codec is not None)
        with_bagua(*ours, algorithm, between=islands, process_group=alone)
        for number in range(pairs + 1):
            for times, who in zip(found, (ours, theirs), strict=True):
                barrier()
                took = take_steps(*who, data, period)
                if number:  # The first one warms up.
                    times.append(took)
        barrier()
    return found


def main() -> None:
    """Print the median of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=50.0)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--folder", default=None, help="where the folder is made")
    parser.add_argument("--period", type=int, default=0, help="steps from one exchange to the next; 0 for one exchange")
    parser.add_argument("--codec", default=None, help="as of diloco")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        pool = ProcessRanks(2, backend="gloo", deadline_s=1200.0)
        size = (folder, parsed.megabytes, parsed.pairs)
        if parsed.period:
            times = pool.run(measure_steps, *size, parsed.period, parsed.codec)[0]
            names = f"{parsed.period} steps beside an exchange", "without one"
        else:
            times = pool.run(measure, *size)[0]
            names = "file://", "Gloo"
    ours, theirs = map(statistics.median, times)
    told = f"{names[0]} {ours * 1e3:.0f} ms, {names[1]} {theirs * 1e3:.0f} ms"
    print(f"{parsed.megabytes:g} MB, {parsed.pairs} pairs: {told}")
    print(f"ratio of medians {ours / theirs:.3f}")


if __name__ == "__main__":
    main()
