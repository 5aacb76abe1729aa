"""The backend ``bagua`` of ``torch.distributed``, under what torch builds on a backend."""

from __future__ import annotations

import sys
from pathlib import Path

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


@pytest.mark.parametrize(("nodes", "transport"), [((0, 0), "shm"), ((0, 1), "gloo"), ((0, 0, 1), "hybrid")])
def test_calls_of_torch_and_their_works(pool: ProcessRanks, port: int, nodes: tuple[int, ...], transport: str) -> None:
    pool.run(ranks.collectives, port, nodes, transport, size=len(nodes))


def test_ddp_as_a_launcher_starts_it(pool: ProcessRanks, port: int) -> None:
    pool.run(ranks.as_launched, port, 2, size=2)


@needs("the forms of arguments of torch 2.13", TORCH >= (2, 13))
def test_every_form_of_arguments_that_gloo_takes(pool: ProcessRanks, port: int) -> None:
    pool.run(ranks.all_forms, port, size=2)


def test_wrapped_models_are_compiled(pool: ProcessRanks, port: int) -> None:
    pool.run(ranks.compiled, port, size=2)


@pytest.mark.parametrize(
    ("nodes", "transport"),
    [((0, 0), "shm"), ((0, 0, 0), "shm"), ((0, 1), "gloo"), ((0, 1, 2), "gloo"), ((0, 0, 1), "hybrid")],
)
def test_callbacks_may_communicate(pool: ProcessRanks, port: int, nodes: tuple[int, ...], transport: str) -> None:
    pool.run(ranks.callbacks, port, nodes, transport, size=len(nodes))


def test_meshes_shards_and_groups_of_groups(pool: ProcessRanks, port: int, tmp_path: Path) -> None:
    pool.run(ranks.meshes, port, str(tmp_path))


def test_survivors_of_a_killed_rank_name_it(pool: ProcessRanks, port: int) -> None:
    *survivors, lost = pool.outcomes(ranks.lose_a_rank, port, 3, size=3)
    assert isinstance(lost.error, RankDiedError)
    for survivor in survivors:
        assert survivor.error is None, survivor.trace
        assert survivor.value < 15.0


@pytest.mark.parametrize(
    ("nodes", "call"),
    [
        *(((0, 1, 2), call) for call in ("allreduce", "send")),
        *(((0, 0, 0), call) for call in ("allreduce", "send")),
    ],
)
def test_a_rank_that_dies_before_gloo_has_connected_it(
    pool: ProcessRanks, port: int, nodes: tuple[int, ...], call: str
) -> None:
    """Gloo may connect two ranks at their first call, and knows no deadline there (gloo#520)."""
    *survivors, lost = pool.outcomes(ranks.die_before_the_first_call, port, nodes, call, size=len(nodes))
    assert isinstance(lost.error, RankDiedError)
    for survivor in survivors:
        assert survivor.error is None, survivor.trace
        assert survivor.value < 15.0


def test_errors_can_be_left_to_those_who_hold_futures(pool: ProcessRanks, port: int) -> None:
    pool.run(ranks.leave_errors_to_futures, port, size=2)


def test_a_backend_that_torch_would_drop_is_refused(pool: ProcessRanks) -> None:
    pool.run(ranks.mixed_strings, size=1)


def test_processes_end_well_whatever_they_leave_open() -> None:
    """Each rank ends in another way: nothing is destroyed, or all of it, in an odd order."""
    python = (sys.executable, "-W", "error")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Torch warns of the call that nobody waits for.
    with launched(2, "-m", "tests.comm.torch_backend_exits", python=python, **quiet) as ranks:
        assert ends(ranks) == [(0, "at the end\n")] * 2
