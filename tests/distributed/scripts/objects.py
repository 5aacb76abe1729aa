"""Objects of plain data: settings to all, results to one, and messages."""

import torch
import torch.distributed as dist


def run(rank, size):
    settings = [{"lr": 0.1, "steps": [1, 2]}, "name", None] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(settings, src=0)
    assert settings == [{"lr": 0.1, "steps": [1, 2]}, "name", None]

    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered == [{"rank": one} for one in range(size)]

    report = [None] * size if rank == 1 else None
    dist.gather_object((rank, "done"), report, dst=1)
    assert report == ([(one, "done") for one in range(size)] if rank == 1 else None)

    mine = [None]
    dist.scatter_object_list(mine, [f"for {one}" for one in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]

    letter = ["a", {"b": 2}] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(letter, dst=1)
    elif rank == 1:
        dist.recv_object_list(letter, src=0)
        assert letter == ["a", {"b": 2}]
    return [torch.tensor(rank)]
