"""Whoever dies in the middle of training is named by the steps of all survivors, hierarchical or not."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.algorithms import ByteGradAlgorithm, GradientAllReduceAlgorithm
from bagua.errors import PeerLostError
from bagua.parallel.data_parallel import DistributedDataParallel
from bagua.testing import ProcessRanks, RankPool, ThreadRanks, die

SIZE = 4
BACKENDS = [
    pytest.param("threads", marks=pytest.mark.threads),
    pytest.param("shm", marks=pytest.mark.shm),
    pytest.param("gloo", marks=pytest.mark.gloo),
    pytest.param("hybrid", marks=pytest.mark.hybrid),
]
ALGORITHMS = {
    "allreduce": GradientAllReduceAlgorithm(),
    "hierarchical allreduce": GradientAllReduceAlgorithm(hierarchical=True),
    "hierarchical bytegrad": ByteGradAlgorithm(hierarchical=True),
}


def pool(backend: str) -> RankPool:
    return ThreadRanks(SIZE) if backend == "threads" else ProcessRanks(SIZE, backend=backend)


def train(algorithm: str, victim: int) -> PeerLostError:
    rank = bagua.comm.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8), algorithm=ALGORITHMS[algorithm])
    for step in range(6):
        if step == 3 and rank == victim:
            die()
        try:
            model(torch.ones(1, 8)).sum().backward()
        except PeerLostError as error:
            assert step in (2, 3, 4), "the step before may hear of the death, or the one after"
            return error
    raise AssertionError("nobody was lost")


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_survivors_name_the_rank_that_died(backend: str, algorithm: str) -> None:
    hosts = [SIZE] if backend == "shm" else [2, 2]
    for victim in range(SIZE):
        outcomes = pool(backend).outcomes(train, algorithm, victim, size=SIZE, hosts=hosts)
        for rank in set(range(SIZE)) - {victim}:
            assert outcomes[rank].error is None, outcomes[rank].trace
            error = outcomes[rank].value
            assert error.peers == (victim,), f"rank {rank}: {error}"
            assert error.rank == rank
            assert str(error).count("lost rank") == 1, str(error)
