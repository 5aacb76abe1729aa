"""Hierarchical exchange: inside hosts, between their leaders, inside hosts; exact for uneven hosts."""

from __future__ import annotations

import pytest

from tests.harness import State, mlp, reference, sgd
from tests.parallel.wrapping import Loop, assert_trained, of_this_rank


def _train(intra_comm_root_rank: int = 0) -> State:
    options = {"hierarchical_reduce": True, "intra_comm_root_rank": intra_comm_root_rank}
    return Loop("bagua_init", of_this_rank, **options).train(4)


@pytest.mark.parametrize("hosts", [[2, 1], [1, 3, 2], [2, 2], [3], [1, 1]], ids=str)
def test_the_mean_is_exact_on_uneven_hosts(thread_ranks, hosts):
    size = sum(hosts)
    assert_trained(thread_ranks(size, _train, hosts=hosts), reference(mlp(), sgd, size, range(4)))


def _leads(intra_comm_root_rank: int) -> bool:
    loop = Loop(hierarchical_reduce=True, intra_comm_root_rank=intra_comm_root_rank)
    return bool(loop.reducer.group.inter_node_communicator)


def test_any_local_rank_that_every_host_has_can_lead(thread_ranks):
    assert thread_ranks(4, _leads, 0, hosts=[2, 2]) == [True, False, True, False]
    assert thread_ranks(4, _leads, 1, hosts=[2, 2]) == [False, True, False, True]
    assert_trained(thread_ranks(4, _train, 1, hosts=[2, 2]), reference(mlp(), sgd, 4, range(4)))
