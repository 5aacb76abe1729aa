"""Hierarchical exchange: inside hosts, between their leaders, inside hosts; exact for uneven hosts."""

from __future__ import annotations

import pytest

import bagua.comm
from tests.harness import State, assert_close, assert_same_on_all_ranks, mlp, reference, sgd
from tests.parallel.wrapping import Loop, of_this_rank


def _train(intra_comm_root_rank: int = 0) -> tuple[State, int]:
    options = {"hierarchical_reduce": True, "intra_comm_root_rank": intra_comm_root_rank}
    state = Loop("bagua_init", of_this_rank, **options).train(4)
    stats = bagua.comm.stats()
    return state, stats["reduce"].calls if "reduce" in stats else 0


@pytest.mark.parametrize("hosts", [[2, 1], [1, 3, 2], [2, 2], [3], [1, 1]], ids=str)
def test_the_mean_is_exact_on_uneven_hosts(thread_ranks, hosts):
    size = sum(hosts)
    results = thread_ranks(size, _train, hosts=hosts)
    assert_same_on_all_ranks([state for state, _ in results])
    assert_close(results[0][0], reference(mlp(), sgd, size, range(4)))


def test_one_host_and_one_rank_per_host_use_the_flat_form(thread_ranks):
    assert all(reduces == 0 for _, reduces in thread_ranks(3, _train, hosts=[3]))
    assert all(reduces == 0 for _, reduces in thread_ranks(2, _train, hosts=[1, 1]))
    assert any(reduces > 0 for _, reduces in thread_ranks(3, _train, hosts=[2, 1])), "this test can fail"


def _leads(intra_comm_root_rank: int) -> bool:
    loop = Loop(hierarchical_reduce=True, intra_comm_root_rank=intra_comm_root_rank)
    return bool(loop.reducer.group.inter_node_communicator)


def test_any_local_rank_that_every_host_has_can_lead(thread_ranks):
    assert thread_ranks(4, _leads, 0, hosts=[2, 2]) == [True, False, True, False]
    assert thread_ranks(4, _leads, 1, hosts=[2, 2]) == [False, True, False, True]
    results = thread_ranks(4, _train, 1, hosts=[2, 2])
    assert_close(results[0][0], reference(mlp(), sgd, 4, range(4)))
