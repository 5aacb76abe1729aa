"""Shared memory against Gloo: the same collective of bagua on ``shm`` and of ``torch.distributed``, in one process.

And what it costs that ranks compare their calls: the smallest allreduce, with and without.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from bagua import comm
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import Communicator
from bagua.comm.transports.memory import transport as memory
from benchmarks.paired import Comparison, Rounds, compare, compare_added, measure, slowest

__all__ = ["KINDS", "SETTLE", "Case", "cases", "compare_with_gloo"]

TIMEOUT_S = 60.0
CHECK_LIMIT_US = 1.0
#: Calls after which memory lies in the cache as in a long row of the same call; with 25 MB it takes six.
SETTLE = 6
KINDS = ("broadcast", "allgather", "reduce_scatter", "alltoall")


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        kind: of collective.
        size_bytes: of one rank's input.
        calls: in one sample.
        registered: whether the tensor is one of ``communicator.empty``.
        limit: the largest share of the peer's time that is promised; None where nothing is.
    """

    kind: str
    size_bytes: int
    calls: int
    registered: bool
    limit: float | None

    def name(self, ranks: int, peer: str = "gloo") -> str:
        """What was measured."""
        memory = ", empty()" if self.registered else ""
        return f"{ranks} ranks, {self.size_bytes:>8} B{memory}: shm {self.kind} : {peer}"


def cases(ranks: int, largest_bytes: int) -> list[Case]:
    """What is measured with so many ranks, up to the given size."""
    small, medium, large = (1 / 8, 1 / 6, 1 / 3) if ranks == 2 else (1 / 5, 1 / 3, 1 / 3)
    found = [Case("allreduce", size, 100, False, small) for size in (4, 1024, 16 * 1024)]
    found += [Case("allreduce", 256 * 1024, 30, False, medium if ranks == 2 else small)]
    found += [Case("allreduce", size, 10, False, medium) for size in (1 << 20, 4 << 20)]
    found += [Case("allreduce", 25_000_000, 2, False, large)]
    found += [Case("allreduce", 25_000_000, 2, True, 1 / 10 if ranks == 2 else large)]
    if ranks == 2:
        found += [Case(kind, 4 << 20, 5, False, 1 / 3) for kind in KINDS]
    return [case for case in found if case.size_bytes <= largest_bytes]


def make_calls(case: Case, communicator: Communicator) -> tuple[Callable[[], object], Callable[[], object]]:
    """The collective on Gloo, and on ``communicator``."""
    numel, size = case.size_bytes // 4, communicator.size
    if case.kind == "allreduce":
        tensor = torch.zeros(numel)
        ours = communicator.empty(numel, dtype=tensor.dtype).zero_() if case.registered else tensor
        return functools.partial(torch.distributed.all_reduce, tensor), functools.partial(communicator.allreduce, ours)
    tensor = torch.zeros(numel)
    if case.kind == "broadcast":
        return (
            functools.partial(torch.distributed.broadcast, tensor, 0),
            functools.partial(communicator.broadcast, tensor, 0),
        )
    output = torch.zeros({"allgather": numel * size, "reduce_scatter": numel // size, "alltoall": numel}[case.kind])
    theirs: Any = {
        "allgather": torch.distributed.all_gather_single,
        "reduce_scatter": torch.distributed.reduce_scatter_single,
        "alltoall": torch.distributed.all_to_all_single,
    }[case.kind]
    return functools.partial(theirs, output, tensor), functools.partial(
        getattr(communicator, case.kind), output, tensor
    )


def time_cases(rank: Rank, chosen: list[Case], rounds: int, calls: int) -> list[Rounds]:
    """All cases on this rank and, of two ranks, what the comparison of calls costs."""
    rank.join("shm", TIMEOUT_S)
    communicator = comm.get_default_group().global_communicator
    timed = []
    for case in chosen:
        gloo, shm = make_calls(case, communicator)
        timed.append(
            measure(gloo, shm, rounds=rounds, calls=case.calls, settle=SETTLE, before_each=torch.distributed.barrier)
        )
    if rank.world_size == 2:
        timed.append(time_checks(communicator, rounds, calls))
    comm.destroy_process_group()
    return timed


def time_checks(communicator: Communicator, rounds: int, calls: int) -> Rounds:
    """An allreduce of 4 bytes on this rank, without and with the comparison of calls."""
    module: Any = memory
    tensor, compares = torch.zeros(1), module.compare

    def unchecked() -> None:
        module.compare = lambda _ranks, _rank, _notices: None
        communicator.allreduce(tensor)

    def checked() -> None:
        module.compare = compares
        communicator.allreduce(tensor)

    timed = measure(unchecked, checked, rounds=rounds, calls=calls, before_each=communicator.barrier)
    module.compare = compares
    return timed


def compare_with_gloo(rounds: int, largest_bytes: int, calls: int) -> list[Comparison]:
    """All lines about shared memory; two ranks, then four.

    Args:
        rounds: of each line.
        largest_bytes: larger cases are left out.
        calls: in one sample of what the comparison of calls costs.
    """
    comparisons = []
    for ranks in (2, 4):
        chosen = cases(ranks, largest_bytes)
        measured = list(zip(*run_ranks(time_cases, ranks, (chosen, rounds, calls)), strict=True))
        for case, timed in zip(chosen, measured, strict=False):
            comparisons.append(compare(case.name(ranks), slowest(timed), case.limit))
        if ranks == 2:
            name = "2 ranks, 4 B: shm allreduce, calls compared : not"
            comparisons.append(compare_added(name, slowest(measured[-1]), CHECK_LIMIT_US))
    return comparisons
