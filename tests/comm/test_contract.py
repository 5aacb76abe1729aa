"""The transports of this project against the contract that all transports share."""

import pytest

from bagua.testing import ProcessRanks, ThreadRanks
from tests.contract.transports import TransportContract
from tests.versions import nccl_ranks


@pytest.mark.threads
class TestThreads(TransportContract):
    sizes = (2, 3, 5)

    @pytest.fixture
    def pool(self):
        return ThreadRanks(5)


@pytest.mark.solo
class TestSolo(TransportContract):
    sizes = (1,)
    can_lose_ranks = False

    @pytest.fixture
    def pool(self):
        return ProcessRanks(1, backend="solo")


@pytest.mark.shm
class TestShm(TransportContract):
    """The collectives are those of threads, which run with five ranks, too."""

    @pytest.fixture
    def pool(self):
        return ProcessRanks(3, backend="shm")


@pytest.mark.gloo
class TestGloo(TransportContract):
    compares_calls = False
    matches_in_order = False
    adds_in_float32 = False

    @pytest.fixture
    def pool(self):
        return ProcessRanks(3, backend="gloo")


@pytest.mark.gloo
class TestGlooWithDebugChecks(TransportContract):
    sizes = (3,)
    compares_messages = False
    matches_in_order = False
    adds_in_float32 = False

    @pytest.fixture
    def pool(self):
        return ProcessRanks(3, backend="gloo", environment={"BAGUA_DEBUG": "1"})


@pytest.mark.nccl
class TestNccl(TransportContract):
    sizes = (2,)
    compares_calls = False
    adds_in_float32 = False
    keeps_apart = False
    receives_from_any = False
    names_the_dead = False  # untried
    blocks_host = False
    deadline_s = 1.5  # untried with less

    @pytest.fixture
    def pool(self):
        if nccl_ranks() < 2:
            pytest.skip("two ranks on NCCL need two GPUs, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1")
        return ProcessRanks(2, backend="nccl")
