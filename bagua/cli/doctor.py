"""``bagua doctor``: what this machine offers, how fast it is, and what to set."""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bagua import __version__, comm
from bagua.cli.arguments import positive
from bagua.cli.launch import Rank, RanksFailedError, run_ranks
from bagua.comm import Communicator, backend_refusal
from bagua.link import usable_cores

BACKENDS = ("shm", "gloo", "nccl")
SIZES = ((4, "4 B"), (1_000_000, "1 MB"), (25_000_000, "25 MB"))
TIMEOUT_S = 60.0
SECONDS_PER_SIZE = 0.3
LEAST_CALLS = 5
FEW_DESCRIPTORS = 1024
FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Timing:
    """What one rank measured on one backend.

    Attributes:
        backend: name of the communicator's backend; chosen where none was named.
        hosts: number of ranks on each host.
        seconds: seconds of one allreduce, for each of the sizes.
    """

    backend: str
    hosts: tuple[int, ...]
    seconds: list[float]


def time_backend(rank: Rank, backend: str | None, sizes_bytes: Sequence[int]) -> Timing:
    """Allreduce each size, in the memory that the transport likes best."""
    torch.set_num_threads(1)
    rank.join(backend, TIMEOUT_S)
    group = comm.get_default_group()
    communicator = group.global_communicator
    seconds = [_median_seconds(communicator, size_bytes) for size_bytes in sizes_bytes]
    comm.destroy_process_group()
    return Timing(communicator.backend, group.node_sizes, seconds)


def _median_seconds(communicator: Communicator, size_bytes: int) -> float:
    tensor = communicator.empty(size_bytes // 4, dtype=torch.float32).zero_()
    started, samples = time.perf_counter(), []
    while True:
        before = time.perf_counter()
        communicator.allreduce(tensor)
        samples.append(time.perf_counter() - before)
        # Rank 0 decides for all: clocks differ.
        enough = len(samples) >= LEAST_CALLS and before - started > SECONDS_PER_SIZE
        if communicator.broadcast_object(enough if communicator.rank == 0 else None):
            return statistics.median(samples)


def describe_machine() -> list[str]:
    """Lines about processors, memory and versions."""
    cores, devices = usable_cores(), torch.cuda.device_count()
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    return [
        f"bagua {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {system}",
        f"{cores} processor cores, {_available_gib()} of memory available, {devices} CUDA device{'s'[: devices != 1]}",
    ]


def _available_gib() -> str:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return "an unknown amount"
    # Some containers, and the first WSL, have a file without this line.
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)
    return "an unknown amount" if kib is None else f"{kib / 1024 / 1024:.1f} GiB"


def describe_transports() -> list[str]:
    """One line for each transport: available, or why not."""
    reasons = {backend: backend_refusal(backend) for backend in BACKENDS}
    return [f"{name:<5} {'available' if why is None else f'not available: {why}'}" for name, why in reasons.items()]


def describe_timings(timings: Sequence[Timing], ranks: int) -> list[str]:
    """A table of the time of an allreduce and its bandwidth: a row for each size, columns for each backend."""
    lines = [f"allreduce, {ranks} ranks" + "".join(f"{timing.backend:>24}" for timing in timings)]
    for (size_bytes, name), *seconds in zip(SIZES, *(timing.seconds for timing in timings), strict=True):
        lines.append(f"{name:<18}" + "".join(f"{_readable(one):>12}{_rate(size_bytes / one):>12}" for one in seconds))
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:6.2f} GB/s" if bytes_per_s >= 1e7 else f"{bytes_per_s / 1e6:6.2f} MB/s"


def _readable(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def advise(ranks: int) -> list[str]:
    """What to set here, if anything."""
    advice = []
    cores = usable_cores()
    if torch.get_num_threads() * ranks > cores:
        advice.append(f"OMP_NUM_THREADS={max(cores // ranks, 1)}: {ranks} ranks share {cores} cores")
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors <= FEW_DESCRIPTORS:
        advice.append(f"ulimit -n 65536: {descriptors} open files are few for many ranks and models")
    return advice or ["nothing needs to be set"]


def measure(ranks: int) -> list[str]:
    """Lines about which backend is chosen, and how fast each of them is."""
    sizes_bytes = [size_bytes for size_bytes, _ in SIZES]
    available = [backend for backend in ("shm", "gloo") if backend_refusal(backend) is None]
    timings = []
    for number, backend in enumerate([None, *available], start=1):
        what = "finding each other" if backend is None else f"allreduce over {backend}"
        print(f"{number} of {len(available) + 1}: {ranks} new processes, {what}", file=sys.stderr, flush=True)
        timings.append(run_ranks(time_backend, ranks, (backend, [] if backend is None else sizes_bytes))[0])
    chosen, *timings = timings
    choice = f"without backend= bagua takes {chosen.backend}; ranks on each host: {', '.join(map(str, chosen.hosts))}"
    return [choice, "", *describe_timings(timings, ranks)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Look, measure, and print the answer first.

    Args:
        arguments: words that follow ``bagua doctor`` on the command line.

    Returns:
        The exit status: 0, 1 when ranks do not work together, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="bagua doctor", description="Say what this machine offers, and what to set.")
    parser.add_argument("--nproc", type=positive, default=2, metavar="N", help="ranks to measure with (2)")
    parser.add_argument("--no-timing", action="store_true", help="only look, measure nothing")
    options = parser.parse_args(arguments)
    answer, timings, status = advise(options.nproc), [], 0
    if options.nproc > 1 and not options.no_timing:
        try:
            timings = ["", *measure(options.nproc)]
            answer = [f"{options.nproc} ranks work together here", *answer]
        except RanksFailedError as failed:  # What somebody calls a doctor for.
            answer = [f"{options.nproc} ranks do not work together here: {failed}", *answer]
            status = FAILED
        except KeyboardInterrupt:
            print("interrupted; all processes have ended", file=sys.stderr)
            status = INTERRUPTED
    print("\n".join([*answer, "", *describe_machine(), "", *describe_transports(), *timings]))
    if status == 0:
        print("\nnext: bagua demo trains here, and baguarun --nproc 2 train.py starts your script")
    return status
