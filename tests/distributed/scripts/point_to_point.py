"""Two ranks talk, first blocking, then not."""

import torch
import torch.distributed as dist


def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        assert dist.recv(tensor=tensor, src=0) == 0
    if rank == 0:
        tensor += 41
        request = dist.isend(tensor=tensor, dst=size - 1)
        request.wait()
    elif rank == size - 1:
        request = dist.irecv(tensor=tensor, src=0)
        request.wait()
        assert request.is_completed()
    dist.barrier()
    return [tensor]
