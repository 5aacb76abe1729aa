"""A program whose ranks end in different ways, with groups, models and calls still there. Run by a test."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import bagua.torch_api as bagua
from bagua.errors import CommunicatorClosedError


def main() -> None:
    dist.init_process_group("bagua")
    pair, twin = dist.new_group(), dist.new_group()
    bagua.init_process_group()
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=pair)
    for _ in range(2):  # forms the buckets
        wrapped(torch.ones(1, 3)).sum().backward()
    loss = wrapped(torch.ones(1, 3)).sum()
    # Nobody waits for these.
    left = [dist.all_reduce(torch.ones(100_000), group=twin, async_op=True) for _ in range(3)]
    left_functional = functional.all_reduce(torch.ones(5), "sum", twin)
    bagua.allreduce(torch.ones(2))
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group(pair)
        try:
            loss.backward()
        except CommunicatorClosedError:
            del wrapped
        dist.destroy_process_group()
        try:
            dist.all_reduce(torch.ones(1), group=twin)
        except (ValueError, CommunicatorClosedError):
            del left[0], twin
        bagua.destroy_process_group()
    print("at the end")
    del left_functional


if __name__ == "__main__":
    main()
