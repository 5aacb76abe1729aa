"""Groups and subgroups: every rank makes each group, members call."""

from datetime import timedelta

import torch
import torch.distributed as dist


def run(rank, size):
    assert dist.get_world_size(dist.group.WORLD) == size
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(size))
    ends = dist.new_group([0, size - 1], timeout=timedelta(seconds=20))
    tensor = torch.ones(1) * (rank + 1)
    if rank in (0, size - 1):
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=ends)
        assert dist.get_group_rank(ends, size - 1) == 1
        assert dist.get_global_rank(ends, 1) == size - 1
        assert dist.get_rank(ends) == (rank != 0)
        dist.broadcast(tensor, src=size - 1, group=ends)
        dist.reduce(tensor, group_dst=1, group=ends)
    else:
        assert ends == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(ends) == dist.get_world_size(ends) == -1
    after = torch.ones(1) * rank
    dist.all_reduce(after, op=dist.ReduceOp.MAX)

    pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    mine, everyone = dist.new_subgroups_by_enumeration(pairs)
    assert len(everyone) == len(pairs)
    of_pair = torch.full((2,), float(rank))
    dist.all_reduce(of_pair, group=mine)
    own, _ = dist.new_subgroups(group_size=1)
    alone = torch.full((1,), float(rank))
    dist.all_reduce(alone, group=own)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    # What a member that is no destination of a reduce holds is Gloo's business.
    return [after, of_pair, alone, *([tensor] if rank == size - 1 else [])]
