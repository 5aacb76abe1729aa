"""Each function gives the bits that torch's gives on Gloo."""

import pytest

from bagua.testing import ProcessRanks
from tests.distributed.ranks import compare_with_torch


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_results_are_those_of_torch(backend, size):
    compared = ProcessRanks(size, backend=backend).run(compare_with_torch)
    assert compared == [compared[0]] * size
    assert len(compared[0]) == 14
    assert min(compared[0].values()) >= 9
