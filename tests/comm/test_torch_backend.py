"""The backend ``bagua`` of ``torch.distributed``: what torch builds on it, and ranks that are threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bagua.torch_api
from bagua.comm import create_torch_group, torch_private
from bagua.comm.store.serving import connect_store, serve_store
from bagua.comm.torch_backend.work import PlainFutures
from bagua.errors import CommunicatorClosedError, PeerLostError
from bagua.testing import ProcessRanks
from bagua.testing.ranks import RankDiedError
from tests.comm import torch_backend_ranks as ranks
from tests.harness import in_threads
from tests.launching import ends, launched
from tests.versions import TORCH, needs

pytestmark = pytest.mark.shm

#: Ranks that are threads.
SIZE = 3


@pytest.fixture(scope="module")
def pool() -> ProcessRanks:
    return ProcessRanks(4, backend=None)


@pytest.mark.parametrize("job", [ranks.collectives, ranks.callbacks], ids=lambda job: job.__name__)
@pytest.mark.parametrize(("nodes", "transport"), [((0, 0), "shm"), ((0, 1), "gloo"), ((0, 0, 1), "hybrid")])
def test_calls_of_torch_on_each_transport(
    pool: ProcessRanks, port: int, nodes: tuple[int, ...], transport: str, job: Callable[..., None]
) -> None:
    pool.run(job, port, nodes, transport, size=len(nodes))


@pytest.mark.parametrize(
    ("job", "size"),
    [
        (ranks.as_launched, 2),
        pytest.param(ranks.all_forms, 2, marks=needs("the forms of arguments of torch 2.13", TORCH >= (2, 13))),
        (ranks.compiled, 2),
        (ranks.meshes, 4),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_torch_builds_on_a_backend(pool: ProcessRanks, port: int, job: Callable[..., None], size: int) -> None:
    pool.run(job, port, size=size)


def test_survivors_of_a_killed_rank_name_it(pool: ProcessRanks, port: int) -> None:
    *survivors, lost = pool.outcomes(ranks.lose_a_rank, port, 3, size=3)
    assert isinstance(lost.error, RankDiedError)
    for survivor in survivors:
        assert survivor.error is None, survivor.trace


def test_a_backend_that_torch_would_drop_is_refused(pool: ProcessRanks) -> None:
    pool.run(ranks.mixed_strings, size=1)


def test_processes_end_well_whatever_they_leave_open() -> None:
    """Each rank ends in another way: nothing is destroyed, or all of it, in an odd order."""
    python = (sys.executable, "-W", "error")
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # Torch warns of the call that nobody waits for.
    with launched(2, "-m", "tests.comm.torch_backend_exits", python=python, **quiet) as ranks:
        assert ends(ranks) == [(0, "at the end\n")] * 2


# Ranks that are threads of one process, and groups that nobody holds any more.


def on_threads(function: Callable[[Any, int], Any]) -> list[Any]:
    """``function(group, rank)`` in three threads, each with a group of torch of its own."""
    assert bagua.torch_api is not None
    store, port = serve_store()

    def rank_of(rank: int) -> Any:
        request = torch_private.backend_request()
        request.store = dist.PrefixStore("threads", connect_store(port, 20.0))
        request.group_rank, request.group_size, request.timeout = rank, SIZE, timedelta(seconds=20)
        request.group_id, request.global_ranks_in_group = "threads", list(range(SIZE))
        groups = [torch_private.plugins()["BAGUA"].creator_fn(request, None)]
        return function(groups, rank)

    results = in_threads(SIZE, rank_of)
    del store
    return results


def test_peers_learn_of_a_group_that_was_dropped() -> None:
    ready = threading.Barrier(SIZE, timeout=60)

    def drop_one(groups: list[Any], rank: int) -> BaseException | None:
        groups[0].allreduce(torch.ones(1)).wait()
        ready.wait()
        if rank == SIZE - 1:
            seen = weakref.ref(groups[0])
            groups.clear()
            gc.collect()
            assert seen() is None
            return None
        try:
            groups[0].allreduce(torch.ones(1)).wait(timedelta(seconds=10))
        except PeerLostError as error:
            return error
        finally:
            groups[0].shutdown()
        return None

    *errors, dropped = on_threads(drop_one)
    assert dropped is None
    for error in errors:
        assert isinstance(error, PeerLostError)
        assert error.peers == (SIZE - 1,)


def test_groups_without_a_default_group_and_with_plain_futures() -> None:
    """What software asks for that makes its groups itself, as torchft does."""
    store, port = serve_store()
    options = bagua.torch_api.TorchBackendOptions(ordered_callbacks=False)

    def talk(rank: int) -> list[Any]:
        own = dist.PrefixStore("own", connect_store(port, 20.0))
        group = create_torch_group(own, rank, 2, 20.0, name="own", options=options)
        asynchronous = dist.AllreduceOptions()
        asynchronous.asyncOp = True
        early = group.allreduce([torch.ones(2)], asynchronous).get_future()
        work = group.allreduce([torch.ones(3)], asynchronous)
        work.wait()
        ran_in: list[int] = []
        work.get_future().then(lambda _: ran_in.append(threading.get_ident()))
        at_once = ran_in == [threading.get_ident()]
        group.shutdown()
        with pytest.raises(CommunicatorClosedError):
            group.allreduce([torch.ones(1)]).wait()
        return [early.wait()[0].tolist(), work.result()[0].tolist(), at_once, group.rank(), group.size()]

    assert in_threads(2, talk) == [[[2.0] * 2, [2.0] * 3, True, rank, 2] for rank in range(2)]
    del store


def test_a_plain_future_hands_on_what_went_wrong() -> None:
    def fail() -> None:
        raise PeerLostError("rank 1 is gone")

    future = PlainFutures().future(None, fail)
    with pytest.raises(PeerLostError, match="rank 1"):
        future.wait()
