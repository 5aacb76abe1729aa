"""Each function gives the bits that torch's gives on Gloo."""

import pytest

from bagua.testing import ProcessRanks
from tests.distributed.ranks import COPYING, REDUCING, compare_with_torch, kinds_of


@pytest.fixture(scope="module", params=["gloo", "shm"])
def pool(request):
    return ProcessRanks(3, backend=request.param)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [*REDUCING, *COPYING])
def test_results_are_those_of_torch(pool, name, size):
    number = len(kinds_of(name))
    assert number >= 9
    assert pool.run(compare_with_torch, name, size=size) == [number] * size
