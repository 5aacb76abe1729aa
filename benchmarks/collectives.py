"""Collectives through bagua against bare ``torch.distributed``, and what a call costs above the transport.

Two processes, Gloo, the loopback device: ``bagua.allreduce(tensor)`` against ``torch.distributed.all_reduce(tensor)``.

One process: ``Communicator.allreduce`` of 4 bytes against what it ends in, as B - A. On ``solo`` that is a transport's
``start`` with a call that is described already; on ``gloo``, in a group of one, once the transport's ``start`` and once
the ``allreduce`` of torch's own group object.

Where processes can share memory: collectives on ``shm`` against those of ``torch.distributed`` on Gloo, what comparing
calls costs, and, where mpi4py is installed, collectives on ``shm`` against those of Open MPI. ``--plot`` draws them.

``python -m benchmarks.collectives``

Results, with those of docs/shared_memory.md: two ranks on two cores of a virtual machine, medians of 40 rounds. Four
ranks on the same cores took 3 to 18 % of Gloo's time up to 1 MiB, 33 % with 4 MiB, and 46 % with 25 MB. Comparing calls
costs 0.8 us for each.

| call | shared memory | of Gloo's time | of Open MPI's time |
|---|---|---|---|
| broadcast, 4 MiB | 0.36 ms | 0.27 | 1.1 |
| allgather, 4 MiB | 0.96 ms | 0.21 | 1.4 |
| reduce_scatter, 4 MiB | 0.47 ms | 0.10 | 0.5 |
| alltoall, 4 MiB | 0.51 ms | 0.29 | 1.6 |
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from bagua import comm
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import Communicator, Membership
from bagua.comm.call import Call
from bagua.comm.transports.c10d.torch_transport import C10dTransport
from bagua.comm.transports.shm.transport import shm_refusal
from benchmarks.collectives_plot import draw
from benchmarks.open_mpi import compare_with_open_mpi, open_mpi_is_missing
from benchmarks.paired import (
    Rounds,
    add_arguments,
    compare,
    compare_added,
    conclude,
    measure,
    slowest,
)
from benchmarks.shared_memory import compare_with_gloo

TIMEOUT_S = 60.0
RATIO_LIMITS = {4: 1.15, 25_000_000: 1.05}
OVERHEAD_LIMIT_US = 4.0


@dataclass(frozen=True)
class Size:
    """How many bytes to reduce, and how often in one sample."""

    size_bytes: int
    calls: int

    @property
    def name(self) -> str:
        """The size with its unit."""
        for factor, unit in ((1e6, "MB"), (1e3, "KB")):
            if self.size_bytes >= factor:
                return f"{self.size_bytes / factor:g} {unit}"
        return f"{self.size_bytes} B"


SIZES = [Size(4, 300), Size(4_000, 100), Size(100_000, 30), Size(1_000_000, 10), Size(25_000_000, 2)]


def time_allreduce(rank: Rank, sizes: list[Size], rounds: int) -> list[Rounds]:
    """Both kinds of allreduce on this rank, for each size."""
    rank.join("gloo", TIMEOUT_S)
    timed = []
    for size in sizes:
        tensor = torch.zeros(size.size_bytes // 4)
        bare = functools.partial(torch.distributed.all_reduce, tensor)
        through_bagua = functools.partial(comm.allreduce, tensor)
        timed.append(
            measure(bare, through_bagua, rounds=rounds, calls=size.calls, before_each=torch.distributed.barrier)
        )
    comm.destroy_process_group()
    return timed


def time_overhead(rank: Rank, rounds: int, calls: int) -> dict[str, Rounds]:
    """A call through a communicator of one rank against what it ends in."""
    rank.join("gloo", TIMEOUT_S)
    tensor = torch.zeros(1)
    solo = comm.get_default_group().global_communicator
    alone = Membership(torch.distributed.HashStore(), 0, (0,), (0,), TIMEOUT_S)
    gloo = Communicator(C10dTransport("gloo", alone), TIMEOUT_S)
    against = {
        f"{solo.backend}: transport.start": (solo, start_on_transport(solo, tensor)),
        "gloo: transport.start": (gloo, start_on_transport(gloo, tensor)),
        "gloo: torch's group object": (gloo, start_on_torch_group(tensor)),
    }
    timed = {
        name: measure(baseline, functools.partial(communicator.allreduce, tensor), rounds=rounds, calls=calls)
        for name, (communicator, baseline) in against.items()
    }
    gloo.close()
    comm.destroy_process_group()
    return timed


def start_on_transport(communicator: Communicator, tensor: torch.Tensor) -> Callable[[], None]:
    """The same call on the transport below ``communicator``, without all that a communicator does."""
    transport = communicator._transport  # noqa: SLF001  # its cost is what is measured
    call = Call("allreduce", tensor.dtype, tensor.numel(), "sum", sequence=1)

    def run() -> None:
        transport.start(call, tensor, tensor, TIMEOUT_S, False).wait()

    return run


def start_on_torch_group(tensor: torch.Tensor) -> Callable[[], None]:
    """The same call on torch's default group object, without ``torch.distributed`` around it."""
    group = torch.distributed.group.WORLD
    assert group is not None
    options = torch.distributed.AllreduceOptions()

    def run() -> None:
        group.allreduce([tensor], options).wait()

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, rounds=30)
    parser.add_argument("--largest", type=int, default=25_000_000, metavar="BYTES", help="leave larger sizes out")
    parser.add_argument("--calls", type=int, default=2000, metavar="N", help="calls in a sample of the overhead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw time against size, a line for each transport")
    options = parser.parse_args(arguments)
    sizes = [size for size in SIZES if size.size_bytes <= options.largest]
    comparisons = []
    of_ranks = run_ranks(time_allreduce, 2, (sizes, options.rounds))
    for size, *rounds in zip(sizes, *of_ranks, strict=True):
        name = f"2 ranks, {size.name}: bagua.allreduce : all_reduce"
        comparisons.append(compare(name, slowest(rounds), RATIO_LIMITS.get(size.size_bytes)))
    (overheads,) = run_ranks(time_overhead, 1, (options.rounds, options.calls))
    for name, rounds in overheads.items():
        limit_us = OVERHEAD_LIMIT_US if name.endswith("transport.start") else None
        comparisons.append(compare_added(f"1 rank, {name}", rounds, limit_us))
    notes = {}
    if shm_refusal() is None:
        comparisons += compare_with_gloo(options.rounds, options.largest, options.calls)
        missing = open_mpi_is_missing()
        if missing:
            notes["Open MPI"] = f"left out, {missing}"
        else:
            comparisons += compare_with_open_mpi(options.rounds, options.largest)
    if options.plot is not None:
        drawn = draw(comparisons, options.plot)
        notes["plot"] = str(options.plot) if drawn else "not drawn, matplotlib is not installed"
    return conclude(comparisons, options, notes)


if __name__ == "__main__":
    sys.exit(main())
