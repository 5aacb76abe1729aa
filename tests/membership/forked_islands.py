"""A rank of an island of two, for `test_processes.py`: prints an object of JSON after each outer step.

It ends when its standard input does. ``fork`` is for benchmarks, whose processes need what this one has imported.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import bagua.torch_api as bagua

PERIOD = 4


def fork(job: Callable[[], object]) -> tuple[int, int]:
    """The process that runs ``job``, and what it prints."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writer, 1)
        os.close(reader)
        status = 1
        try:
            job()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    return process, reader


def main(where: str, number: str) -> None:
    torch.set_num_threads(1)
    told_to_end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), told_to_end.set()), daemon=True).start()
    bagua.init_process_group(timeout=60.0)
    torch.manual_seed(2 * int(number) + bagua.get_rank())
    model: Any = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with bagua.join_islands(where, size=2, minimum=1, timeout=60.0) as islands:
        algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=PERIOD)
        model.with_bagua(optimizer, algorithm, between=islands)
        data = torch.randn(4, 64)
        while True:
            ends = torch.tensor([told_to_end.is_set()], dtype=torch.uint8)
            bagua.allreduce(ends)
            if ends:  # Some rank of the island was told to end.
                break
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            step = model.bagua_step
            if step % PERIOD == 0:
                said = {"number": int(number), "rank": bagua.get_rank(), "step": step, "seat": islands.seat}
                said |= {"sum": float(model.weight.detach().sum()), "contributed": islands.members().contributed}
                print(json.dumps(said), flush=True)
            time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
