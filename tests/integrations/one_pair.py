"""The jobs of several tests on one pair of processes: what each process imports for them takes seconds."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import bagua.comm
from bagua.testing import ProcessRanks

Job = Callable[..., Any]


def run_all(jobs: dict[Job, tuple[Any, ...]], deadline_s: float = 240.0) -> dict[Job, list[Any]]:
    """Call each function with its arguments, one after the other, on two ranks. What it returned on each rank.

    A job that fails ends the run: each test that wants one of its results fails with that error.
    """
    of_ranks = ProcessRanks(2, deadline_s=deadline_s).run(_each, list(jobs.items()))
    return dict(zip(jobs, map(list, zip(*of_ranks, strict=True)), strict=True))


def _each(jobs: list[tuple[Job, tuple[Any, ...]]]) -> list[Any]:
    return [function(*arguments) for function, arguments in jobs]


def as_torchrun_starts_it() -> None:
    """What Accelerate looks for before it finds that torch.distributed is initialized already."""
    rank = str(bagua.comm.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    warnings.simplefilter("ignore")
