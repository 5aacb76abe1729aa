"""An exchange between two islands through a folder, compared with Gloo on loopback: ``python -m benchmarks.bucket``.

Both run in turn, in the same two processes. What is measured is one allreduce of a contribution, which both members
enter together.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch

from bagua.comm import get_default_group, group_of_seats, open_store
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


def main() -> None:
    """Print the median of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=50.0)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--folder", default=None, help="where the folder is made")
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        pool = ProcessRanks(2, backend="gloo")
        through_bucket, through_gloo = pool.run(measure, folder, parsed.megabytes, parsed.pairs)[0]
    ours, theirs = statistics.median(through_bucket), statistics.median(through_gloo)
    print(f"{parsed.megabytes:g} MB, {parsed.pairs} pairs: file:// {ours * 1e3:.0f} ms, Gloo {theirs * 1e3:.0f} ms")
    print(f"ratio of medians {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
