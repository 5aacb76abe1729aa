"""Islands of two processes each: a rank is killed, an island comes. Run as a script; prints one object of JSON.

The processes are forked from this one, which has imported torch already.
"""

import json
import os
import selectors
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

import bagua.torch_api as bagua
from bagua.cli.baguarun import main as baguarun

PERIOD = 4
RANKS = 2
DEADLINE_S = 60.0


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


def island(where: str, number: int, rank: int) -> None:
    torch.set_num_threads(1)
    going = [True]
    signal.signal(signal.SIGTERM, lambda *_: going.clear())
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    store = PrefixStore(f"island{number}", TCPStore(host, int(port), is_master=False, wait_for_workers=False))
    limit = timedelta(seconds=DEADLINE_S)
    bagua.init_process_group(store=store, rank=rank, world_size=RANKS, timeout=limit)
    torch.manual_seed(RANKS * number + rank)
    model: Any = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with bagua.join_islands(where, size=2, minimum=1, timeout=DEADLINE_S) as islands:
        algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=PERIOD)
        model.with_bagua(optimizer, algorithm, between=islands)
        data = torch.randn(4, 64)
        while True:
            ends = torch.tensor([not going], dtype=torch.uint8)
            bagua.allreduce(ends)
            if ends:  # Some rank of the island was told to end.
                break
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            step = model.bagua_step
            if step % PERIOD == 0:
                said = {"number": number, "rank": rank, "step": step, "sum": float(model.weight.detach().sum())}
                said |= {"seat": islands.seat, "contributed": islands.members().contributed}
                print(json.dumps(said), flush=True)
            time.sleep(0.01)


class Crowd:
    """The islands that run, and what they have said."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.selector = selectors.DefaultSelector()
        self._rest = defaultdict[int, bytes](bytes)
        self._ends = time.monotonic() + DEADLINE_S

    def listen(self, enough: Callable[[], bool]) -> None:
        """Take in what they say until it is ``enough``, or all have ended."""
        while not enough() and self.selector.get_map():
            assert time.monotonic() < self._ends, self.said[-4:]
            for key, _ in self.selector.select(0.1):
                found = os.read(key.fd, 65536)
                if not found:
                    self.selector.unregister(key.fd)
                *lines, self._rest[key.fd] = (self._rest[key.fd] + found).split(b"\n")
                # Gloo in old versions of torch prints, too.
                self.said += [json.loads(line) for line in lines if line.startswith(b"{")]

    def count(self, number: int, rank: int) -> int:
        return sum((one["number"], one["rank"]) == (number, rank) for one in self.said)

    def has(self, number: int, outer_steps: int) -> bool:
        return all(self.count(number, rank) >= outer_steps for rank in range(RANKS))


def main() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=1.0).step()  # The first step imports half of torch: once for all processes.
    server, reader = fork(lambda: baguarun(["--serve-islands", "127.0.0.1:0"]))
    where = os.read(reader, 1000).decode().split()[3].rstrip(".")
    crowd = Crowd()
    processes = {}

    def start(number: int) -> None:
        for rank in range(RANKS):
            processes[number, rank], output = fork(partial(island, where, number, rank))
            crowd.selector.register(output, selectors.EVENT_READ)

    for number in range(2):
        start(number)
    crowd.listen(lambda: crowd.has(0, 3) and crowd.has(1, 3))
    os.kill(processes[1, 1], signal.SIGKILL)
    seen = max(crowd.count(0, rank) for rank in range(RANKS))
    crowd.listen(lambda: crowd.has(0, seen + 2))
    start(2)
    crowd.listen(lambda: crowd.has(2, 2))
    for (number, _), process in processes.items():
        if number != 1:
            os.kill(process, signal.SIGTERM)
    crowd.listen(lambda: False)
    ends = {f"{number}.{rank}": os.waitpid(process, 0)[1] for (number, rank), process in processes.items()}
    os.kill(server, signal.SIGTERM)
    status = os.waitpid(server, 0)[1]
    print(json.dumps({"said": crowd.said, "ends": ends, "server": status}))


if __name__ == "__main__":
    main()
