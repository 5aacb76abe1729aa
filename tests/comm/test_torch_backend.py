"""The backend ``bagua`` of ``torch.distributed``, under what torch builds on a backend."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from bagua.testing import ProcessRanks
from bagua.testing.ranks import RankDiedError
from tests.comm import torch_backend_ranks as ranks
from tests.launching import ends, launched
from tests.versions import TORCH, needs

pytestmark = pytest.mark.shm


@pytest.fixture(scope="module")
def pool() -> ProcessRanks:
    return ProcessRanks(4, backend=None)


@pytest.mark.parametrize("job", [ranks.collectives, ranks.callbacks], ids=lambda job: job.__name__)
@pytest.mark.parametrize(("nodes", "transport"), [((0, 0), "shm"), ((0, 1), "gloo"), ((0, 0, 1), "hybrid")])
def test_calls_of_torch_on_each_transport(
    pool: ProcessRanks, port: int, nodes: tuple[int, ...], transport: str, job: Callable[..., None]
) -> None:
    pool.run(job, port, nodes, transport, size=len(nodes))


@pytest.mark.parametrize(
    ("job", "size"),
    [
        (ranks.as_launched, 2),
        pytest.param(ranks.all_forms, 2, marks=needs("the forms of arguments of torch 2.13", TORCH >= (2, 13))),
        (ranks.compiled, 2),
        (ranks.meshes, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_torch_builds_on_a_backend(pool: ProcessRanks, port: int, job: Callable[..., None], size: int) -> None:
    pool.run(job, port, size=size)


def test_survivors_of_a_killed_rank_name_it(pool: ProcessRanks, port: int) -> None:
    *survivors, lost = pool.outcomes(ranks.lose_a_rank, port, 3, size=3)
    assert isinstance(lost.error, RankDiedError)
    for survivor in survivors:
        assert survivor.error is None, survivor.trace


def test_a_backend_that_torch_would_drop_is_refused(pool: ProcessRanks) -> None:
    pool.run(ranks.mixed_strings, size=1)


def test_processes_end_well_whatever_they_leave_open() -> None:
    """Each rank ends in another way: nothing is destroyed, or all of it, in an odd order."""
    python = (sys.executable, "-W", "error")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Torch warns of the call that nobody waits for.
    with launched(2, "-m", "tests.comm.torch_backend_exits", python=python, **quiet) as ranks:
        assert ends(ranks) == [(0, "at the end\n")] * 2
