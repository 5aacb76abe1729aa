"""Where contracts of algorithms are tested."""

import pytest

from bagua.testing import RankPool


@pytest.fixture
def pool(thread_pool: RankPool) -> RankPool:
    return thread_pool
