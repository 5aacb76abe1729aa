"""A coordinator hands out work and collects results."""

import torch
import torch.distributed as dist


def run(rank, size):
    share = torch.empty(2, dtype=torch.int32)
    work = list(torch.arange(2 * size, dtype=torch.int32).split(2)) if rank == 0 else None
    dist.scatter(share, work)
    share *= 10
    results = [torch.zeros(2, dtype=torch.int32) for _ in range(size)] if rank == size - 1 else None
    dist.gather(share, results, dst=size - 1)
    flat = torch.empty(2 * size, dtype=torch.int32)
    dist.all_gather_into_tensor(flat, share)
    if results is not None:
        assert torch.equal(torch.cat(results), flat)
    total = share.clone()
    dist.reduce(total, dst=0, op=dist.ReduceOp.SUM)
    return [share, flat, *([total] if rank == 0 else [])]
