"""The shared-memory transport: what the contract of all transports does not say."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import settings

from bagua.comm.store.serving import serve_store
from bagua.testing import ProcessRanks
from bagua.testing.ranks import RankDiedError
from tests.comm import shm_ranks
from tests.comm.memory_ranks import LARGE, SMALL

pytestmark = pytest.mark.shm

#: As many as any of the calls below has; the last of them may be steps of the next call.
STEPS = 8


@pytest.mark.parametrize(("size", "area_bytes"), [(2, "65599"), (4, "65536")])
def test_small_areas(size: int, area_bytes: str) -> None:
    """Data that passes in many pieces."""
    pool = ProcessRanks(size, backend="shm", environment={"BAGUA_SHM_STAGING_BYTES": area_bytes})
    pool.run(shm_ranks.all_kinds, (0, 1, 100_000))


@pytest.mark.parametrize("numel", [shm_ranks.LARGE, shm_ranks.PIECES])
def test_memory_of_the_communicator_is_reduced_where_it_lies(shm_pool, numel: int) -> None:
    assert shm_pool.run(shm_ranks.reduce_in_place, numel, size=3) == [False] * 3


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_may_pass_different_memory(shm_pool, size: int) -> None:
    shm_pool.run(shm_ranks.mix_memory, size=size)


def test_messages_from_shared_memory(shm_pool) -> None:
    shm_pool.run(shm_ranks.send_from_shared_memory, size=3)


@pytest.mark.parametrize("seed", range(4))
def test_equal_calls_from_changing_places(shm_pool, seed: int) -> None:
    shm_pool.run(shm_ranks.exchange_alike_from_changing_places, seed, size=2)


def test_the_message_that_differs_is_named(shm_pool) -> None:
    for said in shm_pool.run(shm_ranks.send_another_size_after_equal_ones, size=2):
        assert "#4 send(6 x float32, peer 1) on rank 0" in said
        assert "#4 recv(5 x float32, peer 0) on rank 1" in said


# Nothing grows, nothing stays.


@pytest.mark.parametrize(
    ("job", "times"),
    [(shm_ranks.rebuild, 200), (shm_ranks.open_and_close, 6), (shm_ranks.many_small_calls, 4000)],
    ids=["buckets", "communicators", "calls"],
)
def test_nothing_grows(shm_pool, job, times: int) -> None:
    for before, after in shm_pool.run(job, times, size=3):
        # A peer may have yet to notice that the last segment has gone.
        assert after[0] <= before[0] + 2, "descriptors"
        assert after[1] <= before[1] + 4, "mappings"


def test_memory_that_was_read_does_not_outlive_its_owner(shm_pool) -> None:
    assert shm_pool.run(shm_ranks.forget_what_was_read, size=2) == [(0, 0), (0, 0)]


def test_dev_shm_is_not_used(shm_pool) -> None:
    before = set(os.listdir("/dev/shm"))
    shm_pool.run(shm_ranks.all_kinds, (SMALL, LARGE), size=2)
    assert nothing_new_stays(before)


def test_waiting_costs_little(shm_pool) -> None:
    shares = shm_pool.run(shm_ranks.wait_for_a_late_rank, 1.0, size=3)
    assert max(shares[1:]) <= 0.05


def test_what_a_forked_child_writes_is_its_own(shm_pool) -> None:
    assert shm_pool.run(shm_ranks.write_in_a_child, size=2) == [(True, True)] * 2


# Ranks that are lost.


@pytest.mark.parametrize(
    ("kind", "numel", "barrier"),
    [
        ("allreduce", shm_ranks.LARGE, 1),
        ("allreduce", shm_ranks.PIECES, -(-shm_ranks.PIECES // (1 << 17))),  # pieces of 512 KiB
        ("broadcast", shm_ranks.LARGE, 1),
        ("alltoall", shm_ranks.LARGE, 1),
    ],
)
def test_who_leaves_after_its_last_call_takes_nothing_from_the_others(
    shm_pool, kind: str, numel: int, barrier: int
) -> None:
    shm_pool.run(shm_ranks.read_what_has_left, kind, numel, barrier, size=2)


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "alltoall_v", "sendrecv"])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_killed_at_each_step(shm_pool, kind: str, numel: int, size: int) -> None:
    outcomes = shm_pool.outcomes(shm_ranks.lose_a_rank_at_each_step, kind, numel, STEPS, size=size, timeout_s=90.0)
    assert isinstance(outcomes[1].error, RankDiedError)
    for survivor in (outcomes[0], *outcomes[2:]):
        assert survivor.error is None, survivor.trace
        for step, (name, peers, seconds) in enumerate(survivor.value, start=1):
            assert (name, peers) == ("PeerLostError", (1,)), f"step {step}: {survivor}"
            assert seconds < 60.0, "the deadline is 90"


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_killed_at_any_time(shm_pool, seed: int) -> None:
    check_kill(shm_pool, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_ranks_killed_at_any_time(shm_pool) -> None:
    """200 in a row with ``HYPOTHESIS_PROFILE=thorough``."""
    kills = 200 if settings.get_current_profile_name() == "thorough" else 12
    for seed in range(100, 100 + kills):
        check_kill(shm_pool, seed)


def nothing_new_stays(before: set[str]) -> bool:
    """Whether ``/dev/shm`` soon holds no more than before; other processes put things there and take them away."""
    until = time.monotonic() + 60
    while (more := set(os.listdir("/dev/shm")) - before) and time.monotonic() < until:
        time.sleep(0.1)
    return not more


def check_kill(pool, seed: int) -> None:
    before = set(os.listdir("/dev/shm"))
    outcomes = pool.outcomes(shm_ranks.lose_a_rank_at_any_time, seed, size=2 + seed % 2, timeout_s=90.0)
    dead = [outcome.rank for outcome in outcomes if isinstance(outcome.error, RankDiedError)]
    assert len(dead) == 1, outcomes
    for survivor in outcomes:
        if survivor.rank in dead:
            continue
        assert survivor.error is None, survivor.trace
        name, peers, late_s, victim = survivor.value
        assert (name, peers) == ("PeerLostError", (victim,)), f"seed {seed}: {survivor}"
        assert late_s < 60.0
    assert nothing_new_stays(before)


@pytest.mark.parametrize("at", range(1, 7))
def test_a_stopped_rank_does_no_harm_when_it_wakes(shm_pool, at: int) -> None:
    """Stopped at each step of a call on shared memory; the survivor goes on with its tensor."""
    (name, untouched), _ = shm_pool.run(shm_ranks.stop_and_wake, shm_ranks.LARGE, at, size=2)
    assert name == "CollectiveTimeoutError"
    assert untouched


# Who gets it.


def run_anew(size: int, job, *arguments):
    """What ``job`` returns on ranks that have yet to initialize."""
    store, port = serve_store()
    pool = ProcessRanks(size, backend=None, environment={"BAGUA_LOG": "info"})
    results = pool.run(job, port, *arguments)
    del store
    return results


@pytest.mark.parametrize(
    ("obstacle", "backend"),
    [("none", "shm"), ("no_shared_memory", "gloo"), ("no_descriptors", "gloo"), ("no_connection", "gloo")],
)
def test_the_default_backend(obstacle: str, backend: str) -> None:
    """Shared memory if all ranks can have it; what one rank lacks all lack, and the log says so."""
    outcomes = run_anew(3, shm_ranks.start_without_a_choice, obstacle, None)
    for own_backend, total, log in outcomes:
        assert (own_backend, total) == (backend, 6.0)
        assert ("rank 1" in log and "for this test" in log) is (obstacle != "none"), log
        assert f"backend {backend}" in log
    warned = ["cannot share memory" in log for *_, log in outcomes]
    assert warned == [obstacle != "none", False, False], "one rank of the host warns, once"


def test_the_default_backend_on_several_hosts() -> None:
    for nodes, backend in (((0, 0, 1), "hybrid"), ((0, 1, 2), "gloo")):
        outcomes = run_anew(3, shm_ranks.start_without_a_choice, "none", nodes)
        assert [outcome[:2] for outcome in outcomes] == [(backend, 6.0)] * 3


@pytest.mark.parametrize("obstacle", ["no_shared_memory", "no_descriptors", "no_connection"])
def test_a_demand_that_cannot_be_met(obstacle: str) -> None:
    for text in run_anew(3, shm_ranks.demand, obstacle, 3):
        assert "for this test" in text, text
