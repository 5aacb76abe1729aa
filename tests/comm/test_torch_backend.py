"""The backend ``bagua`` of ``torch.distributed``, under what torch builds on a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.comm.stores import serve_store
from bagua.testing import ProcessRanks
from bagua.testing.ranks import RankDiedError
from tests.comm import torch_backend_ranks as ranks

pytestmark = pytest.mark.shm


@pytest.fixture(scope="module")
def pool() -> ProcessRanks:
    return ProcessRanks(4, backend=None)


@pytest.fixture
def port():
    store, port = serve_store()
    yield port
    del store


def test_every_collective_of_torch(pool: ProcessRanks, port: int) -> None:
    pool.run(ranks.collectives, port, 2, size=2)


def test_ddp_as_a_launcher_starts_it(pool: ProcessRanks, port: int) -> None:
    pool.run(ranks.as_launched, port, 2, size=2)


def test_meshes_shards_and_groups_of_groups(pool: ProcessRanks, port: int, tmp_path: Path) -> None:
    pool.run(ranks.meshes, port, str(tmp_path))


def test_survivors_of_a_killed_rank_name_it(pool: ProcessRanks, port: int) -> None:
    *survivors, lost = pool.outcomes(ranks.lose_a_rank, port, 3, size=3)
    assert isinstance(lost.error, RankDiedError)
    for survivor in survivors:
        assert survivor.error is None, survivor.trace
        assert survivor.value < 5.0


def test_a_backend_that_torch_would_drop_is_refused(pool: ProcessRanks) -> None:
    pool.run(ranks.mixed_strings, size=1)
