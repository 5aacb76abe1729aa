"""Processes that have imported what other frameworks begin with: that takes seconds."""

import importlib.util
import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from bagua.comm.store.serving import serve_store
from bagua.testing import ProcessRanks
from tests.integrations.one_pair import do_jobs

_FRAMEWORKS = ("accelerate", "lightning.pytorch", "transformers.trainer")


@pytest.fixture(scope="session")
def imported_before() -> tuple[str, ...]:
    return tuple(name for name in _FRAMEWORKS if importlib.util.find_spec(name.partition(".")[0]))


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """Two ranks for ``on_ranks``, the same for all tests of a module, which begin with its ``BEGIN``.

    When a test fails, those after it fail with it.
    """
    (store, port), numbers, said = serve_store(), itertools.count(), SimpleQueue()
    ranks = ProcessRanks(2, deadline_s=getattr(request.module, "DEADLINE_S", 240.0))
    ranks.take_report = said.put
    end = ThreadPoolExecutor(1).submit(ranks.run, do_jobs, port, request.module.BEGIN)
    end.add_done_callback(lambda _: said.put({}))  # A test that waits for a report goes on.

    def run(job: Any, size: int) -> list[Any]:
        store.set(f"job {next(numbers)}", pickle.dumps(job))
        found: dict[int, Any] = {}
        while len(found) < size:
            found |= end.result() if end.done() and said.empty() else said.get()
        return [found[rank] for rank in range(size)]

    yield SimpleNamespace(run=run)
    store.set(f"job {next(numbers)}", pickle.dumps(None))
    end.result()  # It raises what no test has seen, too.
