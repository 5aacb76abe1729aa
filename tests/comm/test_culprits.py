"""Whoever dies is named by all survivors, and nobody else is: on every transport, in groups, and late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import bagua.comm
from bagua.comm import ReduceOp
from bagua.errors import BaguaError, PeerLostError
from bagua.testing import ProcessRanks, RankPool, ThreadRanks
from tests.comm.c10d_ranks import Processes
from tests.contract.failures import die_last

SIZE = 4
#: Backend, and how many ranks believe to be on each host.
PLACES = [
    pytest.param("threads", [4], marks=pytest.mark.threads),
    pytest.param("shm", [4], marks=pytest.mark.shm),
    pytest.param("gloo", [4], marks=pytest.mark.gloo),
    pytest.param("gloo", [2, 2], marks=pytest.mark.gloo),
    pytest.param("hybrid", [2, 2], marks=pytest.mark.hybrid),
    pytest.param("hybrid", [1, 3], marks=pytest.mark.hybrid),
]


def pool(backend: str) -> RankPool:
    return ThreadRanks(SIZE) if backend == "threads" else ProcessRanks(SIZE, backend=backend)


def lost_in(call: object) -> PeerLostError:
    """The error that ``call`` raises."""
    try:
        call()  # type: ignore[operator]
    except PeerLostError as error:
        return error
    raise AssertionError("nobody was lost")


def calls_until_one_is_lost(comm: bagua.comm.Communicator, numel: int) -> PeerLostError:
    """The survivors' error: of the first call without the victim, or of the next one."""

    def calls() -> None:
        for _ in range(2):
            comm.allreduce(torch.ones(numel), ReduceOp.AVG)

    return lost_in(calls)


def lose(victim: int, numel: int) -> PeerLostError:
    comm = bagua.comm.get_default_group().global_communicator
    comm.allreduce(torch.ones(numel))
    die_last(comm.rank == victim, SIZE - 1)
    return calls_until_one_is_lost(comm, numel)


def check(error: BaguaError, victim: int, rank: int) -> None:
    assert error.peers == (victim,), f"rank {rank}: {error}"
    assert error.silent == (), f"rank {rank}: {error}"
    assert error.rank == rank
    assert str(error).count("lost rank") == 1, str(error)
    assert f"lost rank {victim}: it " in str(error)


@pytest.mark.parametrize("numel", [3, 300_000])
@pytest.mark.parametrize(("backend", "hosts"), PLACES)
def test_each_rank_dies_once_and_all_survivors_name_it(backend: str, hosts: list[int], numel: int) -> None:
    for victim in range(SIZE):
        outcomes = pool(backend).outcomes(lose, victim, numel, size=SIZE, hosts=hosts)
        for rank in set(range(SIZE)) - {victim}:
            assert outcomes[rank].error is None, outcomes[rank].trace
            check(outcomes[rank].value, victim, rank)


def lose_in_a_group() -> PeerLostError | None:
    """Ranks of the group count from 0; its errors name global ranks."""
    group = bagua.comm.new_group([1, 2, 3])
    if not group:
        return None
    group.global_communicator.barrier()
    die_last(group.rank == 2, 2)
    error = calls_until_one_is_lost(group.global_communicator, 3)
    assert f"of communicator {group.label}" in str(error)
    return error


@pytest.mark.parametrize(("backend", "hosts"), PLACES[:3])
def test_errors_of_a_group_name_global_ranks(backend: str, hosts: list[int]) -> None:
    outcomes = pool(backend).outcomes(lose_in_a_group, size=SIZE, hosts=hosts)
    for rank in (1, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        check(outcomes[rank].value, 3, rank)


def abort_for_another_rank() -> PeerLostError | None:
    group = bagua.comm.get_default_group()
    if group.rank == 0:
        group.abort("it is on fire", culprit=3)
        return None
    return lost_in(group.global_communicator.barrier)


@pytest.mark.parametrize(("backend", "hosts"), PLACES)
def test_who_aborts_can_blame_another_rank(backend: str, hosts: list[int]) -> None:
    outcomes = pool(backend).outcomes(abort_for_another_rank, size=SIZE, hosts=hosts)
    for rank in (1, 2):
        assert outcomes[rank].value.problem == "lost rank 3: it is on fire"
    # The one that is blamed learns who gave it up.
    assert outcomes[3].value.problem == "lost rank 0: it gave up rank 3: it is on fire"


def wait_for_the_busy_one(directory: str) -> PeerLostError:
    """Rank 2 dies; rank 1 comes when rank 0 has got its error already."""
    comm = bagua.comm.get_default_group().global_communicator
    comm.barrier()
    die_last(comm.rank == 2, 2)
    told = Path(directory) / "told"
    until = time.monotonic() + 60
    while comm.rank == 1 and not told.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    error = calls_until_one_is_lost(comm, 3)
    told.touch()
    return error


@pytest.mark.parametrize(("backend", "hosts"), PLACES[:3])
def test_who_is_busy_is_not_lost(backend: str, hosts: list[int], tmp_path: Path) -> None:
    outcomes = pool(backend).outcomes(wait_for_the_busy_one, str(tmp_path), size=3, hosts=[3])
    for rank in (0, 1):
        assert outcomes[rank].error is None, outcomes[rank].trace
        check(outcomes[rank].value, 2, rank)


@pytest.mark.gloo
@pytest.mark.slow
def test_the_first_to_notice_hosts_the_store_and_is_gone_when_the_others_come() -> None:
    with Processes("first_to_notice_is_gone", 4, own_store=True) as processes:
        for survivor in (0, 1, 2):
            code, output = processes.end(survivor)
            assert "PeerLostError peers=(3,)" in output, output
            assert "lost rank 3: it ended" in output, output
            assert code == 3


def lose_inside_a_host() -> PeerLostError | None:
    """Rank 0 dies. Ranks 1 and 3 notice, and leave; rank 2 waits for rank 3 inside its host."""
    group = bagua.comm.get_default_group().duplicate()
    group.global_communicator.barrier()
    die_last(group.rank == 0, 3)
    if group.rank == 2:
        return calls_until_one_is_lost(group.intra_node_communicator, 3)
    lost_in(group.global_communicator.barrier)
    group.close()
    return None


@pytest.mark.parametrize(("backend", "hosts"), [PLACES[0], PLACES[2]])
def test_who_leaves_for_the_loss_of_another_rank_is_not_named(backend: str, hosts: list[int]) -> None:
    outcomes = pool(backend).outcomes(lose_inside_a_host, size=SIZE, hosts=[2, 2])
    assert outcomes[2].error is None, outcomes[2].trace
    check(outcomes[2].value, 0, 2)
