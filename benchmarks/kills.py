"""Whether a rank that is killed at any moment of training ever hangs another, or another rank is named for it.

``python -m benchmarks.kills --rounds 500`` draws each round from a seed, which is printed if the round goes wrong:
transport, number of ranks, hosts, algorithm, which rank is killed, and when. Each survivor must get an error that names
the killed rank and no other, and keep no shared memory and no thread once it has left its group.
"""

import argparse
import collections
import gc
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn

import bagua.comm
import bagua.torch_api as bagua_api
from bagua.algorithms import Algorithm
from bagua.errors import CollectiveTimeoutError, PeerLostError
from bagua.testing import ProcessRanks

TIMEOUT_S = 30.0
#: An error later than this after the death of the victim counts as a hang.
SOON_S = 10.0
#: Transport, and how many ranks believe to be on each host.
PLACES = (
    ("shm", [2]),
    ("shm", [3]),
    ("shm", [4]),
    ("gloo", [2]),
    ("gloo", [3]),
    ("gloo", [2, 2]),
    ("hybrid", [2, 1]),
    ("hybrid", [2, 2]),
)
ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized")


def live_through_a_kill(algorithm: str, hierarchical: bool, victim: int, delay_s: float, hidden: int) -> str:
    """What is wrong with the error of this rank, or with what is left of its group; empty if nothing is."""
    wrong = train_until_one_is_killed(algorithm, hierarchical, victim, delay_s, hidden)
    bagua_api.destroy_process_group()
    gc.collect()  # The error's traceback and the model refer to each other.
    return wrong or _leaks()


def train_until_one_is_killed(algorithm: str, hierarchical: bool, victim: int, delay_s: float, hidden: int) -> str:
    """What is wrong with the error of this rank; empty if nothing is."""
    group = bagua.comm.get_default_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"hierarchical": True} if hierarchical else {}
    bagua_api.with_bagua(model, optimizer, Algorithm.init(algorithm, **options))
    group.global_communicator.barrier()
    if group.rank == victim:
        threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
    started = time.monotonic()
    try:
        while time.monotonic() < started + TIMEOUT_S:
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
    except (PeerLostError, CollectiveTimeoutError) as error:
        return _wrong(error, victim, time.monotonic() - started - delay_s)
    return "no error at all"


def _wrong(error: PeerLostError | CollectiveTimeoutError, victim: int, seconds: float) -> str:
    if not isinstance(error, PeerLostError) or error.peers != (victim,) or str(error).count("lost rank") != 1:
        return f"rank {victim} was killed, the error is {type(error).__name__} {error}"
    return f"{seconds:.1f} s after the kill" if seconds > SOON_S else ""


def _leaks() -> str:
    until = time.monotonic() + SOON_S
    while True:  # Groups of models are closed in the background.
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:bagua" in line]
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("bagua-")]
        if not (mapped or threads):
            return ""
        if time.monotonic() > until:
            return f"left behind: {mapped} {threads}"
        time.sleep(0.01)


def play(seed: int) -> tuple[str, list[str]]:
    """The kind of one round, and what went wrong in it."""
    draw = random.Random(seed)
    backend, hosts = draw.choice(PLACES)
    algorithm = draw.choice(ALGORITHMS if sum(hosts) % 2 == 0 else ALGORITHMS[:2])
    hierarchical = len(hosts) > 1 and algorithm != "decentralized" and draw.random() < 0.5
    victim, delay_s, hidden = draw.randrange(sum(hosts)), draw.uniform(0.0, 0.3), draw.choice([8, 300, 20_000])
    kind = f"{backend} {hosts} {algorithm}{' hierarchical' if hierarchical else ''}"
    outcomes = ProcessRanks(sum(hosts), backend=backend, timeout_s=TIMEOUT_S, deadline_s=60.0).outcomes(
        live_through_a_kill, algorithm, hierarchical, victim, delay_s, hidden, hosts=hosts
    )
    problems = [
        f"rank {one.rank} of {kind}, rank {victim} killed after {delay_s:.3f} s: {one.value or one.trace}"
        for one in outcomes
        if one.rank != victim and (one.error is not None or one.value)
    ]
    return kind, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    arguments = parser.parse_args()
    played, failed = collections.Counter[str](), 0
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        kind, problems = play(seed)
        played[kind] += 1
        failed += bool(problems)
        for problem in problems:
            print(f"seed {seed}: {problem}", flush=True)
    for kind, rounds in sorted(played.items()):
        print(f"{rounds:4d} {kind}")
    print(f"{arguments.rounds} kills, {failed} rounds went wrong")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
