"""Every rank sends to every rank: equal shares, uneven shares, and lists."""

import torch
import torch.distributed as dist


def run(rank, size):
    even = torch.arange(size * 2) + rank * size * 2
    output = torch.empty(size * 2, dtype=torch.int64)
    dist.all_to_all_single(output, even)

    to_each = [index + 1 for index in range(size)]
    from_each = [rank + 1] * size
    rows = torch.full((sum(to_each), 2), float(rank))
    uneven = torch.empty(sum(from_each), 2)
    dist.all_to_all_single(uneven, rows, output_split_sizes=from_each, input_split_sizes=to_each)
    assert uneven[:, 0].tolist() == [float(source) for source in range(size) for _ in range(rank + 1)]

    parts = list(torch.full((size, 3), 10.0 * rank).unbind())
    received = [torch.empty(3) for _ in range(size)]
    work = dist.all_to_all(received, parts, async_op=True)
    work.wait()
    assert [part[0].item() for part in received] == [10.0 * source for source in range(size)]

    share = torch.empty(2)
    dist.reduce_scatter(share, [torch.full((2,), float(rank + part)) for part in range(size)])
    into = torch.empty(2)
    dist.reduce_scatter_tensor(into, torch.arange(2.0 * size) * (rank + 1))
    return [output, uneven, *received, share, into]
