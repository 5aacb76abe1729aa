"""Islands that are processes: one is killed, one comes. Run as a script; prints one line of JSON for each outer step.

The processes are forked from this one, which has imported torch already.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable

import torch

import bagua.torch_api as bagua
from bagua.cli.baguarun import main as baguarun

PERIOD = 4
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


def island(where: str, number: int, size: int) -> None:
    torch.set_num_threads(1)
    going = [True]
    signal.signal(signal.SIGTERM, lambda *_: going.clear())
    torch.manual_seed(number)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with bagua.join_islands(where, size=size, minimum=1, timeout=DEADLINE_S) as islands:
        algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=PERIOD)
        model.with_bagua(optimizer, algorithm, between=islands)
        data = torch.randn(4, 64)
        while going:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
            step = model.bagua_state_dict()["step"]
            if step % PERIOD == 0:
                said = {"number": number, "step": step, "sum": float(model.weight.detach().sum()), "seat": islands.seat}
                print(json.dumps({**said, "contributed": islands.members().contributed}), flush=True)
            time.sleep(0.01)


class Crowd:
    """The islands that run, and what they have said."""

    def __init__(self) -> None:
        self.said: list[dict] = []
        self._selector = selectors.DefaultSelector()
        self._rest: dict[int, bytes] = {}
        self._ends = time.monotonic() + DEADLINE_S

    def add(self, reader: int) -> None:
        self._selector.register(reader, selectors.EVENT_READ)

    def listen(self, enough: Callable[[], bool]) -> None:
        """Take in what they say until it is ``enough``, or all have ended."""
        while not enough() and self._selector.get_map():
            assert time.monotonic() < self._ends, self.said[-4:]
            for key, _ in self._selector.select(0.1):
                self._take(key.fd)

    def _take(self, reader: int) -> None:
        found = os.read(reader, 65536)
        if not found:
            self._selector.unregister(reader)
            return
        *lines, self._rest[reader] = (self._rest.get(reader, b"") + found).split(b"\n")
        # Gloo in old versions of torch prints, too.
        self.said += [{**json.loads(line), "at": time.monotonic()} for line in lines if line.startswith(b"{")]

    def has(self, number: int, outer_steps: int) -> bool:
        return sum(one["number"] == number for one in self.said) >= outer_steps


def warm_up() -> None:
    """The first step of an optimizer imports half of torch: once for all processes."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.SGD([parameter], lr=1.0).step()


def main() -> None:
    warm_up()
    server, reader = fork(lambda: baguarun(["--serve-islands", "127.0.0.1:0"]))
    where = os.read(reader, 1000).decode().split()[3].rstrip(".")
    crowd = Crowd()
    processes = {}

    def start(number: int, size: int = 3) -> None:
        processes[number], output = fork(lambda: island(where, number, size))
        crowd.add(output)

    for number in range(3):
        start(number)
    crowd.listen(lambda: all(crowd.has(number, 3) for number in range(3)))
    os.kill(processes[1], signal.SIGKILL)
    killed = time.monotonic()
    seen = {number: sum(one["number"] == number for one in crowd.said) for number in (0, 2)}
    crowd.listen(lambda: all(crowd.has(number, count + 2) for number, count in seen.items()))
    after = [one["at"] - killed for one in crowd.said if one["number"] != 1 and 1 > len(one["contributed"]) - 2 >= 0]
    start(3)
    crowd.listen(lambda: crowd.has(3, 2))
    for number in (0, 2, 3):
        os.kill(processes[number], signal.SIGTERM)
    crowd.listen(lambda: False)
    ends = {number: os.waitpid(process, 0)[1] for number, process in processes.items()}
    os.kill(server, signal.SIGTERM)
    status = os.waitpid(server, 0)[1]
    print(json.dumps({"said": crowd.said, "ends": ends, "server": status, "after_s": min(after)}))


if __name__ == "__main__":
    main()
