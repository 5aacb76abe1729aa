"""Where contracts of algorithms are tested."""

import pytest

pool = pytest.fixture(lambda thread_pool: thread_pool)
