"""A ring allreduce with additions, from messages; and the batched form of one step."""

import torch
import torch.distributed as dist


def allreduce(send, recv):
    rank, size = dist.get_rank(), dist.get_world_size()
    send_buffer, recv_buffer, accumulated = send.clone(), send.clone(), send.clone()
    left, right = ((rank - 1) + size) % size, (rank + 1) % size
    for step in range(size - 1):
        if step % 2 == 0:
            request = dist.isend(send_buffer, right)
            dist.recv(recv_buffer, left)
            accumulated[:] += recv_buffer[:]
        else:
            request = dist.isend(recv_buffer, right)
            dist.recv(send_buffer, left)
            accumulated[:] += send_buffer[:]
        request.wait()
    recv[:] = accumulated[:]


def run(rank, size):
    tensor = torch.arange(5.0) + rank
    summed = torch.zeros(5)
    allreduce(tensor, summed)
    expected = tensor.clone()
    dist.all_reduce(expected, op=dist.ReduceOp.SUM)
    assert torch.equal(summed, expected)

    received = torch.empty(5)
    operations = [
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
        dist.P2POp(dist.isend, tensor, (rank + 1) % size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert received[0] == (rank - 1) % size
    return [summed, received]
