"""Shared memory against Open MPI: the same collective of bagua on ``shm`` and of mpi4py, in one process.

The ranks are started by ``mpirun``, so that Open MPI finds what it needs; bagua meets over a store of the process that
started them. Without ``mpirun`` or mpi4py nothing is measured, and a line says so.
"""

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bagua import comm
from bagua.comm import Communicator
from bagua.comm.store.serving import connect_store, serve_store
from benchmarks.paired import Comparison, Rounds, compare, measure, slowest
from benchmarks.shared_memory import KINDS, SETTLE, Case

__all__ = ["compare_with_open_mpi", "open_mpi_is_missing"]

RANKS = 2
TIMEOUT_S = 60.0
FAREWELL_S = 10.0


def open_mpi_is_missing() -> str:
    """What has to be installed before Open MPI can be measured; nothing if all of it is there."""
    if shutil.which("mpirun") is None:
        return "there is no mpirun"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return ""


def cases(largest_bytes: int) -> list[Case]:
    """What is measured, up to the given size; small messages are reported, and nothing is promised."""
    found = [Case("allreduce", size, 100, False, None) for size in (4, 1024, 16 * 1024)]
    found += [Case("allreduce", 256 * 1024, 30, False, 2.0)]
    found += [Case("allreduce", size, 10, False, 2.0) for size in (1 << 20, 4 << 20)]
    found += [Case("allreduce", 25_000_000, 2, False, 1.25), Case("allreduce", 25_000_000, 2, True, 0.5)]
    found += [Case(kind, 4 << 20, 5, False, 2.0) for kind in KINDS]
    return [case for case in found if case.size_bytes <= largest_bytes]


def compare_with_open_mpi(rounds: int, largest_bytes: int) -> list[Comparison]:
    """All lines about Open MPI.

    Raises:
        RuntimeError: ``mpirun`` failed.
    """
    store, port = serve_store()
    with tempfile.TemporaryDirectory() as folder:
        run_mpi([str(port), str(rounds), str(largest_bytes), folder], 120.0 + 5.0 * rounds)
        of_ranks = [read_rounds(Path(folder) / str(rank)) for rank in range(RANKS)]
    del store  # The ranks needed it until now.
    return [
        compare(case.name(RANKS, "Open MPI"), slowest(timed), case.limit)
        for case, *timed in zip(cases(largest_bytes), *of_ranks, strict=True)
    ]


def run_mpi(arguments: list[str], timeout_s: float) -> None:
    """Run this module on all ranks, and leave none of them behind."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(RANKS)]
    command += [sys.executable, "-m", __name__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            process.terminate()  # It ends its ranks; killed, it could not.
            try:
                process.wait(FAREWELL_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode:
        raise RuntimeError(f"mpirun ended with exit status {process.returncode}:\n{said}")


def read_rounds(path: Path) -> list[Rounds]:
    """What one rank has measured."""
    return [Rounds(**samples) for samples in json.loads(path.read_text())]


# On the ranks.


def make_calls(case: Case, communicator: Communicator, mpi: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """The collective of Open MPI, and on ``communicator``."""
    numel, size, world = case.size_bytes // 4, communicator.size, mpi.COMM_WORLD
    tensor = torch.zeros(numel)
    if case.kind == "allreduce":
        ours = communicator.empty(numel, dtype=tensor.dtype).zero_() if case.registered else tensor
        theirs = functools.partial(world.Allreduce, mpi.IN_PLACE, tensor.numpy())
        return theirs, functools.partial(communicator.allreduce, ours)
    if case.kind == "broadcast":
        theirs = functools.partial(world.Bcast, tensor.numpy(), 0)
        return theirs, functools.partial(communicator.broadcast, tensor, 0)
    output = torch.zeros({"allgather": numel * size, "reduce_scatter": numel // size, "alltoall": numel}[case.kind])
    name = {"allgather": "Allgather", "reduce_scatter": "Reduce_scatter_block", "alltoall": "Alltoall"}[case.kind]
    theirs = functools.partial(getattr(world, name), tensor.numpy(), output.numpy())
    return theirs, functools.partial(getattr(communicator, case.kind), output, tensor)


def measure_here(port: int, rounds: int, largest_bytes: int, folder: Path) -> None:
    """All cases on this rank, into a file of its own."""
    from mpi4py import MPI  # noqa: PLC0415  # an optional peer; importing it starts MPI

    rank = MPI.COMM_WORLD.Get_rank()
    torch.set_num_threads(1)
    comm.init_process_group(
        backend="shm", store=connect_store(port, TIMEOUT_S), rank=rank, world_size=RANKS, timeout=TIMEOUT_S
    )
    communicator = comm.get_default_group().global_communicator
    timed = []
    for case in cases(largest_bytes):
        theirs, ours = make_calls(case, communicator, MPI)
        timed.append(
            measure(theirs, ours, rounds=rounds, calls=case.calls, settle=SETTLE, before_each=communicator.barrier)
        )
    (folder / str(rank)).write_text(json.dumps([asdict(samples) for samples in timed]))
    comm.destroy_process_group()


if __name__ == "__main__":
    port_text, rounds_text, largest_text, folder_text = sys.argv[1:]
    measure_here(int(port_text), int(rounds_text), int(largest_text), Path(folder_text))
