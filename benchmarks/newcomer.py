"""How long a newcomer takes until it contributes, and what it costs the members that give it the state.

``python -m benchmarks.newcomer --rate 1gbit`` lets three islands train with DiLoCo on a link of that rate, in a network
namespace of its own (needs root), and a fourth one join in the middle of a period. Inner steps mostly sleep, so that a
few cores suffice. Prints the seconds from ``join_islands()`` to the first contribution beside what they may be: 3 s,
1.3 times the state over the free bandwidth, and the rest of the period.

With ``--rate 2gbit`` and a state of 200 MB, a newcomer contributed 5.6 s after it joined. Until then the three members
trained at 94 to 96 % of their speed (2026-11-22).
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.comm import serve_store_at
from benchmarks.chaos import Member, wait_for

MEMBERS = 3
#: Periods that members train before the newcomer is started, and the part of the next one that is over when it joins.
WARM, PART = 2, 0.4


class Large(torch.nn.Module):
    """Many weights, of which a step computes with one."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.idle = torch.nn.Parameter(torch.randn(weights))
        self.used = torch.nn.Parameter(torch.ones(1))

    def forward(self) -> torch.Tensor:
        return self.used.square().sum()


def train(where: str, arguments: argparse.Namespace, *, late: bool) -> None:
    """One island: tells each step, and who contributed, on standard output."""
    torch.set_num_threads(1)
    model: Any = Large(arguments.megabytes * 1_000_000 // 3 // 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    algorithm = bagua.algorithms.Algorithm.init("diloco", sync_every=arguments.sync_every)
    if late:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        tell(waits=True)
        signal.sigwait({signal.SIGUSR1})
    joined = time.monotonic()
    with bagua.join_islands(where, size=MEMBERS, minimum=1, timeout=300.0) as islands:
        model = model.with_bagua(optimizer, algorithm, between=islands)
        tell(joined=joined, came_in=time.monotonic(), step=model.bagua_step)
        while True:
            optimizer.zero_grad()
            model().backward()
            time.sleep(arguments.pause)
            optimizer.step()
            step = model.bagua_step
            tell(step=step, at=time.monotonic(), contributed=islands.members().contributed, seat=islands.seat)


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class Island(Member):
    """One island, and what it says."""

    def facts(self, last: int = 0) -> list[dict[str, Any]]:
        """All that it has said, or the last words."""
        return [json.loads(line) for _, line in self.lives[-1][-last:]]

    def steps(self, last: int = 0) -> list[dict[str, Any]]:
        return [one for one in self.facts(last) if "at" in one]

    def has_made(self, step: int) -> bool:
        return any(one["step"] >= step for one in self.steps(1))


def bandwidth_of_link() -> float:
    """Bytes per second of one stream on the loopback device."""
    payload = bytes(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        thread = threading.Thread(target=sender.sendall, args=(64 * payload,), daemon=True)
        started, received = time.monotonic(), 0
        thread.start()
        while received < 64 << 20:
            received += len(receiver.recv(1 << 20))
        sender.close()
        receiver.close()
    return received / (time.monotonic() - started)


def pace(steps: list[dict[str, Any]], period: int, since: float = 0.0, until: float = float("inf")) -> float:
    """Seconds of an inner step of one island between two moments, without those that wait in an exchange."""
    return statistics.fmean(
        after["at"] - before["at"]
        for before, after in itertools.pairwise(steps)
        if since <= before["at"] and after["at"] <= until and after["step"] % period
    )


def measure(arguments: argparse.Namespace) -> None:
    link = bandwidth_of_link()
    store, where = serve_store_at("127.0.0.1", 0)
    options = [
        f"--{name}={getattr(arguments, name.replace('-', '_'))}" for name in ("megabytes", "sync-every", "pause")
    ]
    command = [sys.executable, "-m", "benchmarks.newcomer", f"--where={where}", *options]
    members = [Island(command, {}) for _ in range(MEMBERS)]
    newcomer = Island([*command, "--late"], {})
    try:
        for one in [*members, newcomer]:
            one.start()
        starts = int((WARM + PART) * arguments.sync_every)
        wait_for(lambda: newcomer.facts() and all(one.has_made(starts) for one in members))
        newcomer.send(signal.SIGUSR1)
        wait_for(lambda: any(one["seat"] in one["contributed"] for one in newcomer.steps(1)))
        last = newcomer.steps(1)[0]["step"]
        wait_for(lambda: all(one.has_made(last) for one in members))  # which end that period, too
    finally:
        for one in [*members, newcomer]:
            one.end()
    report(arguments, link, members, newcomer)
    del store


def report(arguments: argparse.Namespace, link: float, members: list[Island], newcomer: Island) -> None:
    came = next(one for one in newcomer.facts() if "joined" in one)
    first = next(one for one in newcomer.steps() if one["seat"] in one["contributed"])
    periods = [
        step["at"]
        for step in members[0].steps()
        if step["step"] % arguments.sync_every == 0 and step["at"] > came["joined"]
    ]
    state_s, rest_s = arguments.megabytes * 1e6 / link, periods[0] - came["joined"]
    period = arguments.sync_every
    quiet = statistics.fmean(
        pace([s for s in one.steps() if period < s["step"] < WARM * period], period) for one in members
    )
    longest = max(
        after["at"] - before["at"]
        for one in members
        for before, after in itertools.pairwise(one.steps())
        if came["joined"] <= before["at"] <= first["at"] and after["step"] % period
    )
    allowed = 3.0 + 1.3 * state_s + rest_s
    took = first["at"] - came["joined"]
    entered = came["came_in"] - came["joined"]
    print(
        f"state {arguments.megabytes} MB, link {link / 1e6:.0f} MB/s, so {state_s:.2f} s; rest of period {rest_s:.2f} s"
    )
    print(f"came in after {entered:.2f} s, at step {came['step']}, with period {arguments.sync_every}")
    print(f"contributed after {took:.2f} s, at step {first['step']}; allowed {allowed:.2f} s")
    for until, what in ((came["came_in"], "came in"), (first["at"], "contributed")):
        busy = statistics.fmean(pace(one.steps(), period, came["joined"], until) for one in members)
        print(f"members: {quiet:.4f} s a step before, {busy:.4f} s until it {what}: {quiet / busy:.3f} of their speed")
    print(f"the longest of these steps took {longest:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="of the state: weights, anchor and momentum")
    parser.add_argument("--sync-every", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of sleep in each inner step")
    parser.add_argument(
        "--rate", default="", help="of the link, for example 1gbit; none for the loopback device as it is"
    )
    parser.add_argument("--where", default="", help=argparse.SUPPRESS)
    parser.add_argument("--late", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.where:
        train(arguments.where, arguments, late=arguments.late)
    elif arguments.rate and "BAGUA_NEWCOMER" not in os.environ:
        shape = f"ip link set lo up && tc qdisc add dev lo root tbf rate {arguments.rate} burst 1mb latency 50ms"
        again = [sys.executable, "-m", "benchmarks.newcomer", *sys.argv[1:]]
        unshare = shutil.which("unshare") or "unshare"
        ended = subprocess.run(
            [unshare, "--net", "sh", "-c", f'{shape} && exec "$@"', "sh", *again],
            env={**os.environ, "BAGUA_NEWCOMER": "1"}, check=False,
        )  # fmt: skip
        raise SystemExit(ended.returncode)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
