"""Whether asynchronous averaging ever hangs or ends with a wrong model: what ``benchmarks.asynchronous stress`` runs.

Each run is drawn from a seed, which is printed first: ``python -m benchmarks.asynchronous stress --cycles 0 --exits 0
--kills 1 --seed 17`` repeats run 17. What the scheduler of the machine does meanwhile is not repeated.

One weight grows by exactly 1 in each step of a rank. Averages may spread it, but must not change its mean: after
``abort`` it is the mean number of steps on every rank, or something was lost, or added twice.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import AsyncModelAverageAlgorithm
from bagua.comm.store.serving import serve_store
from bagua.errors import PeerLostError
from bagua.testing import ProcessRanks

#: Ranks, transport and who meets, for the cycles.
COMPANIES = (
    (2, "gloo", "all"),
    (2, "shm", "shift_one"),
    (4, "gloo", "random_pair"),
    (4, "shm", "all"),
    (4, "gloo", "all"),
    (4, "shm", "ring"),
)
SIZES = (2, 4)
CYCLES_DEADLINE_S = 270.0
RUN_DEADLINE_S = 60.0
#: From the last step of a process to its end.
EXIT_LIMIT_S = 5.0
ENDINGS = ("return", "raise", "exit", "raise in running", "destroy")


class CountingModel(nn.Module):
    """A model whose output is its loss, with one weight that counts steps.

    Args:
        hidden: width, for transfers of different lengths.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 4))
        self.steps = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self.layers(inputs).square().mean() - self.steps.sum()
        return loss


def wrap(seed: int, hidden: int, algorithm: AsyncModelAverageAlgorithm) -> tuple[Any, Callable[[], None]]:
    """A model, and a step of it."""
    torch.manual_seed(seed)
    model = CountingModel(hidden)
    wrapped: Any = model.with_bagua([], algorithm)  # type: ignore[operator]

    def step() -> None:
        model.zero_grad()
        wrapped(torch.randn(8, 16)).backward()
        with torch.no_grad():  # An optimizer would import half of torch at its first step.
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=1.0 if parameter is model.steps else 1e-5)

    return wrapped, step


def fingerprint(model: CountingModel) -> str:
    """Of all weights, bit by bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        assert torch.isfinite(parameter).all()
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


# Train, abort, resume.


def cycle(seed: int, cycles: int, mode: str) -> list[tuple[str, float, int]]:
    """Train, abort and resume at moments of this rank's own choice.

    Returns:
        For each cycle the fingerprint, the counting weight, and this rank's steps so far.
    """
    chance = random.Random(f"{seed} {bagua.get_rank()}")
    model, step = wrap(seed, 64, AsyncModelAverageAlgorithm(mode, 1))
    algorithm = model.bagua_algorithm
    seen, steps = [], 0
    for _ in range(cycles):
        for _ in range(chance.randrange(20)):
            step()
            steps += 1
            time.sleep(chance.choice((0.0, 0.0, 0.003)))
        for _ in range(chance.choice((1, 2))):
            assert algorithm.abort(model), "it stopped alone"
        seen.append((fingerprint(model), model.steps.item(), steps))
        for _ in range(chance.choice((0, 0, 3))):  # On its own.
            step()
            steps += 1
        time.sleep(chance.choice((0.0, 0.01)))
        algorithm.resume(model)
    algorithm.abort(model)
    return seen


def run_cycles(seed: int, cycles: int, size: int, backend: str, mode: str) -> str:
    """Cycles on one company of ranks, compared across ranks."""
    started = time.monotonic()
    of_ranks = ProcessRanks(size, backend=backend).run(cycle, seed, cycles, mode, deadline_s=CYCLES_DEADLINE_S)
    for number, seen in enumerate(zip(*of_ranks, strict=True)):
        prints, counts, steps = zip(*seen, strict=True)
        assert len(set(prints)) == 1, f"cycle {number}: ranks differ after abort"
        mean = sum(steps) / size
        assert abs(counts[0] - mean) < 1e-6, f"cycle {number}: {counts[0]} in place of the mean of {steps}"
    return f"{cycles} cycles, {time.monotonic() - started:.0f} s: equal models, no step lost"


# Killed ranks.


def train_until_killed(seed: int, victim: int) -> tuple[str, tuple[int, ...]]:
    """Train; the victim is killed at some moment. Returns the survivors' model, and whom they miss."""
    chance = random.Random(seed)
    hidden, goes_on = chance.choice((64, 20_000)), chance.random() < 0.5
    algorithm = AsyncModelAverageAlgorithm(
        chance.choice(("all", "shift_one")), 1, on_peer_loss="continue" if goes_on else "raise", peer_timeout_s=4.0
    )
    model, step = wrap(bagua.get_rank(), hidden, algorithm)
    until = time.monotonic() + 30.0
    if bagua.get_rank() == victim:
        threading.Timer(chance.random(), os.kill, (os.getpid(), signal.SIGKILL)).start()
    missed: tuple[int, ...] = ()
    try:
        while time.monotonic() < until and not (goes_on and victim in gone(model)):
            step()
            time.sleep(0.001)
    except PeerLostError as error:
        missed = error.peers
    together = model.bagua_algorithm.abort(model)
    assert together == goes_on
    return fingerprint(model) if together else "", missed or gone(model)


def gone(model: Any) -> tuple[int, ...]:
    """The ranks that this one does not wait for any more."""
    session = model.bagua_algorithm._averager._session  # noqa: SLF001 - nothing public says so
    if session is None:
        return ()
    return tuple(sorted(set(range(bagua.get_world_size())) - {bagua.get_rank()} - set(session.member.remaining)))


def run_kill(seed: int) -> str:
    """One run with a killed rank."""
    size, backend = SIZES[seed % 2], ("gloo", "shm")[seed // 2 % 2]
    victim = random.Random(~seed).randrange(size)
    outcomes = ProcessRanks(size, backend=backend).outcomes(train_until_killed, seed, victim, deadline_s=RUN_DEADLINE_S)
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.error is None for outcome in survivors), outcomes
    prints, missed = zip(*(outcome.value for outcome in survivors), strict=True)
    assert all(victim in named for named in missed), f"rank {victim} was killed, not {missed}"
    assert len(set(prints)) == 1, "survivors that stopped together differ"
    return f"{size} ranks, {backend}, rank {victim} killed, {max(outcome.seconds for outcome in survivors):.1f} s"


# Scripts that just end.


class OutOfDataError(Exception):
    """What ends the training of some ranks."""


def end_somehow(seed: int) -> None:
    """One rank of a script that ends without ``abort``. Prints when it has made its last step."""
    bagua.init_process_group()
    rank = bagua.get_rank()
    chance = random.Random(f"{seed} {rank}")
    hidden = random.Random(seed).choice((64, 64, 20_000))
    model, step = wrap(seed, hidden, AsyncModelAverageAlgorithm("all", 1))
    end = time.monotonic() + chance.random() * chance.choice((1, 1, 1, 4))

    def train() -> None:
        while time.monotonic() < end:
            step()
        print(time.monotonic(), flush=True)

    ending = ending_of(seed, rank)
    if ending == "raise in running":
        with model.bagua_algorithm.running(model):
            train()
            raise OutOfDataError
    train()
    if ending == "raise":
        raise OutOfDataError
    if ending == "exit":
        sys.exit(3)
    if ending == "destroy":
        bagua.destroy_process_group()


def ending_of(seed: int, rank: int) -> str:
    """How that rank ends in that run."""
    return ENDINGS[(seed + rank) % len(ENDINGS)]


def start_rank(seed: int, rank: int, size: int, port: int, errors: IO[str], *, by_agent: bool) -> subprocess.Popen[str]:
    """An interpreter of its own, as a launcher starts it."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_USE_AGENT_STORE": str(by_agent),
        "OMP_NUM_THREADS": "1",
        "BAGUA_TIMEOUT_S": "60",
    }
    command = [sys.executable, "-m", __name__, str(seed)]
    return subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=errors, text=True
    )


def wait_for_ends(ranks: list[subprocess.Popen[str]]) -> list[tuple[int, float | None]]:
    """Exit status of each process, and how long after its last step it ended; None if it had not come to that."""
    ends: dict[int, float] = {}
    until = time.monotonic() + RUN_DEADLINE_S
    while len(ends) < len(ranks) and time.monotonic() < until:
        for index, rank in enumerate(ranks):
            if index not in ends and rank.poll() is not None:
                ends[index] = time.monotonic()
        time.sleep(0.005)
    hanging = [index for index in range(len(ranks)) if index not in ends]
    for rank in ranks:
        rank.kill()
    assert not hanging, f"ranks {hanging} have not ended after {RUN_DEADLINE_S} s"
    said = [rank.communicate()[0] for rank in ranks]
    return [
        (rank.returncode, ends[index] - float(said[index]) if said[index] else None) for index, rank in enumerate(ranks)
    ]


def run_exit(seed: int) -> float:
    """One run of scripts that just end; the longest time from a last step to the end of its process, in seconds."""
    size, by_agent = SIZES[seed % 2], seed // 2 % 2 == 0
    store, port = serve_store()
    if not by_agent:
        del store  # Rank 0 hosts one at the same port.
    with tempfile.TemporaryFile("w+") as file:
        ends = wait_for_ends([start_rank(seed, rank, size, port, file, by_agent=by_agent) for rank in range(size)])
        file.seek(0)
        errors = file.read()
    for rank, (status, seconds) in enumerate(ends):
        expected = {"exit": 3, "raise": 1, "raise in running": 1}.get(ending_of(seed, rank), 0)
        lost_host = not by_agent and rank > 0 and status == 1 and "lost the store" in errors
        assert status == expected or lost_host, f"rank {rank} ended with {status}, not {expected}: {errors}"
        assert lost_host or seconds is not None, f"rank {rank} did not come to its end: {errors}"
        assert seconds is None or seconds <= EXIT_LIMIT_S, f"rank {rank} took {seconds:.1f} s to end: {errors}"
    for word in ("terminate called", "Fatal", "Exception ignored", "Segmentation"):
        assert word not in errors, errors
    return max(seconds or 0.0 for _, seconds in ends)


# All of it.


def announced(seeds: range, what: str) -> Iterator[int]:
    """The seeds, each of which is printed before and named when it fails."""
    for seed in seeds:
        print(f"{what}, seed {seed}", file=sys.stderr, flush=True)
        yield seed


def stress(options: argparse.Namespace) -> dict[str, object]:
    """Run everything that could hang; an exception ends it."""
    notes: dict[str, object] = {}
    for company in COMPANIES if options.cycles else ():
        print(f"cycles on {company}, seed {options.seed}", file=sys.stderr, flush=True)
        result = notes["{} ranks, {}, {}".format(*company)] = run_cycles(options.seed, options.cycles, *company)
        print(result, file=sys.stderr, flush=True)
    for seed in announced(range(options.seed, options.seed + options.kills), "kill"):
        print(run_kill(seed), file=sys.stderr, flush=True)
    if options.kills:
        notes["killed ranks"] = f"{options.kills} runs from seed {options.seed}: all survivors named the rank"
    longest_s = 0.0
    for seed in announced(range(options.seed, options.seed + options.exits), "exit without abort"):
        longest_s = max(longest_s, run_exit(seed))
        print(f"at most {longest_s:.2f} s so far", file=sys.stderr, flush=True)
    if options.exits:
        notes["scripts that end without abort"] = (
            f"{options.exits} runs from seed {options.seed}: processes ended {longest_s:.2f} s after training at most"
        )
    return notes


if __name__ == "__main__":
    end_somehow(int(sys.argv[1]))
