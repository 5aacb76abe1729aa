"""Sums over all ranks, flat and by host: they are the same sums."""

from __future__ import annotations

import pytest
import torch

import bagua.comm
from bagua.primitives import on_leaders, sum_over

LAYOUTS = [[1], [2], [3], [1, 1], [2, 1], [1, 2], [2, 2], [1, 3, 2]]


def _sum(hierarchical: bool) -> tuple[torch.Tensor, list[str]]:
    group = bagua.comm.get_default_group()
    tensor = torch.tensor([1.0, 10.0]) * (group.rank + 1)
    sum_over(tensor, group, lambda total, ranks: ranks.allreduce(total), hierarchical=hierarchical)
    return tensor, [str(call) for call in group.global_communicator.history()]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
@pytest.mark.parametrize("hierarchical", [False, True])
def test_sums_do_not_depend_on_hosts_and_are_flat_without_several_ranks_on_one_of_several(
    thread_ranks, hosts, hierarchical
):
    size, flat = sum(hosts), not hierarchical or len(hosts) == 1 or max(hosts) == 1
    expected = torch.tensor([1.0, 10.0]) * (size * (size + 1) // 2)
    for tensor, calls in thread_ranks(size, _sum, hierarchical, hosts=hosts):
        assert torch.equal(tensor, expected)
        assert any("allreduce" in call for call in calls) == flat


def _sums_seen_by_leaders() -> list[float]:
    group = bagua.comm.get_default_group()
    seen = []
    tensor = torch.tensor([float(2**group.rank)])

    def between_hosts(total, leaders) -> None:
        seen.append(total.item())
        total.fill_(-1.0)

    on_leaders(tensor, group, between_hosts)
    return [*seen, tensor.item()]


def test_leaders_see_sums_over_their_host_and_everyone_gets_what_they_make_of_them(thread_ranks):
    results = thread_ranks(6, _sums_seen_by_leaders, hosts=[1, 3, 2])
    assert results == [[1.0, -1.0], [14.0, -1.0], [-1.0], [-1.0], [48.0, -1.0], [-1.0]]
