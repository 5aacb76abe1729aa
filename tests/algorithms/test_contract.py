"""Every registered algorithm keeps the contract."""

from __future__ import annotations

import pytest

from bagua.algorithms import Algorithm, registry
from bagua.testing.algorithm_contract import (
    ONE_BUCKET_BYTES,
    AlgorithmContract,
    resume_and_train,
    train,
    train_and_save,
)
from bagua.testing.training import assert_same_on_all_ranks
from tests.algorithms.toys import DelayedGossip, LocalSgd, Rounded, WarmsUp


@pytest.fixture
def pool(thread_pool):
    return thread_pool


#: Two runs of an algorithm that exchanges in the background are never alike; such have tests of their own.
SYNCHRONOUS = [name for name in registry if not registry.get(name).implementation.traits.background]


@pytest.fixture(params=SYNCHRONOUS)
def algorithm(request):
    return Algorithm.init(request.param)


@pytest.mark.threads
class TestRegisteredAlgorithm(AlgorithmContract):
    pass


@pytest.mark.gloo
@pytest.mark.parametrize(
    "algorithm", [*map(Algorithm.init, SYNCHRONOUS), Rounded(), DelayedGossip(), LocalSgd(), WarmsUp()], ids=repr
)
def test_training_resumes_bit_exactly_in_new_processes(process_ranks, algorithm):
    """Each run has processes of its own; only what was saved passes from one to the next."""
    whole = process_ranks(2, train, algorithm)
    saved = process_ranks(2, train_and_save, algorithm)
    resumed = process_ranks(2, resume_and_train, algorithm, saved, ONE_BUCKET_BYTES)
    for before, after in zip(whole, resumed, strict=True):
        assert_same_on_all_ranks([before, after])
