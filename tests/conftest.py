"""What all tests share: how many examples the property tests draw, which transports run, and the ranks they run on.

``--transport NAME`` (repeatable) chooses among threads, solo, shm, hybrid, gloo and nccl; without it
all of them run. Tests for one transport carry its name as a marker. Fixtures:

* ``ranks(3, function, *arguments, hosts=[2, 1])`` runs ``function(*arguments)`` on three ranks
  and returns the list of what they returned, once for each chosen transport with several ranks;
* ``thread_ranks(...)`` and ``process_ranks(...)`` do the same on threads, and on processes
  with Gloo. ``rank_pool``, ``thread_pool`` and ``process_pool`` are the pools behind them.

A rank finds its group with ``bagua.comm.get_default_group()``. On processes the function must
be at the top level of its module. What a rank raises is raised here, the likeliest cause first.
"""

import functools
import gc
import os
import shlex
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from bagua.cli import launch
from bagua.comm import serve_store_at
from bagua.comm.store.serving import serve_store
from bagua.testing import PRELOADED, ProcessRanks, RankPool, ThreadRanks
from tests.interpreters import interpreter, spare_the_collector
from tests.versions import leave_out_what_gloo_prints

# A deadline per example is a wall-clock assertion, and these tests run beside other work.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("quick", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# Functions of many tests need them: each rank that is a process would import them anew.
PRELOADED += ["tests.contract.transports", "tests.harness"]
#: Ranks of each pool: what the largest test needs.
_SIZE = 6
#: Longest time of a command's ranks, less than the timeout of a test.
_COMMAND_S = 240.0
TRANSPORTS = ("threads", "solo", "shm", "hybrid", "gloo", "nccl")
#: Fixtures whose ranks are those of one transport.
_POOLS = {"threads": "thread_pool", "shm": "shm_pool", "gloo": "process_pool"}


def pytest_configure(config: pytest.Config) -> None:
    """Ctrl-C works here and in what is started from here, also under `nohup ... &`, where it is ignored.

    Where there is a GPU, only tests that ask for one see it: the others expect what a machine without one does.
    """
    if "nccl" not in (config.getoption("transport") or ()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_out_what_gloo_prints()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transport",
        action="append",
        choices=TRANSPORTS,
        help="run the tests of this transport; repeatable; default: all but nccl, which needs a GPU",
    )


def _chosen(config: pytest.Config) -> tuple[str, ...]:
    return tuple(config.getoption("transport") or TRANSPORTS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rank_pool" in metafunc.fixturenames:
        chosen = [name for name in _POOLS if name in _chosen(metafunc.config)]
        parameters = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in chosen]
        metafunc.parametrize("rank_pool", parameters, indirect=True, scope="session")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test that asks for the ranks of one transport is one of that transport."""
    for transport, pool in _POOLS.items():
        if pool in getattr(item, "fixturenames", ()):
            item.add_marker(transport)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of transports that were not chosen; skip, visibly, what needs a GPU."""
    if nameless := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"processes that run tests side by side must agree on names: {nameless[0]}")
    left_out = set(TRANSPORTS) - set(_chosen(config))
    dropped = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("nccl"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and --transport nccl"))


def pytest_collection_finish() -> None:
    """Spare the many tests that collect garbage the walk through all modules and tests."""
    gc.collect()
    spare_the_collector()


thread_pool = pytest.fixture(lambda: ThreadRanks(_SIZE), scope="session")
process_pool = pytest.fixture(lambda: ProcessRanks(_SIZE, backend="gloo"), scope="session")
shm_pool = pytest.fixture(lambda: ProcessRanks(_SIZE, backend="shm"), scope="session")


@pytest.fixture(scope="session")
def rank_pool(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue(_POOLS[request.param])


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of ``bagua.cli.launch`` come from the fork server of the pools; without this they start as users' do."""
    monkeypatch.setattr(launch.CommandRanks, "method", "forkserver")
    # The ranks of a command have no deadline. In a test they get one, and a rank that hangs says where.
    bounded = functools.partialmethod(launch.CommandRanks.outcomes, deadline_s=_COMMAND_S)
    monkeypatch.setattr(launch.CommandRanks, "outcomes", bounded)


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store that is served during a test."""
    store, port = serve_store()
    yield port
    del store


@pytest.fixture
def where() -> Iterator[str]:
    """The address of such a store, as islands meet at one."""
    store, address = serve_store_at("127.0.0.1", 0)
    yield address
    del store


@pytest.fixture(scope="session")
def imported_before() -> tuple[str, ...]:
    """What forked interpreters have imported besides torch and bagua."""
    return ()


@pytest.fixture
def forked_python(
    imported_before: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The interpreter with which torchrun and baguarun start ranks: a forked one. Returns its path."""
    path = tmp_path_factory.mktemp("python") / "python"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(interpreter(*imported_before))} "$@"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(path))
    return str(path)


def _run(pool: RankPool, size, function, *arguments, **options):
    return pool.run(function, *arguments, size=size, **options)


#: ``ranks(3, function, *arguments, hosts=[2, 1])``: on each chosen transport, on threads, on processes with Gloo.
ranks = pytest.fixture(lambda rank_pool: functools.partial(_run, rank_pool))
thread_ranks = pytest.fixture(lambda thread_pool: functools.partial(_run, thread_pool))
process_ranks = pytest.fixture(lambda process_pool: functools.partial(_run, process_pool))
