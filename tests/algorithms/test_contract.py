"""Every registered algorithm keeps the contract."""

from __future__ import annotations

import pytest

from bagua.algorithms import Algorithm, registry
from bagua.testing.algorithm_contract import AlgorithmContract

pytestmark = pytest.mark.threads


@pytest.fixture
def pool(thread_pool):
    return thread_pool


@pytest.fixture(params=list(registry))
def algorithm(request):
    return Algorithm.init(request.param)


class TestRegisteredAlgorithm(AlgorithmContract):
    pass
