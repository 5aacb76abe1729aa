"""What watching a run costs, and whether it names the rank that is late.

* A step of the MLP of ``benchmarks.training_step`` at batch 16 on shared memory, with the record of calls and with
  metrics that are read after each step, against a step whose calls are neither noted nor counted. The same from its
  parts: how long it takes to note a call and to read the metrics, at best, and how many calls a step makes.
* A step of torch's DDP of the same over Gloo, with ``bagua.watch()`` against without. Only what comes after each step
  is taken away there; the rest is one call of a function for each step.
* The memory that records, counters and windows of a rank hold after many calls.
* A number of runs in which one rank takes 10 % longer than the others to compute, for 2 to 4 processes on shared memory
  and on Gloo: how often ``metrics()`` of rank 0 names it, and how often ``bagua timeline`` does. Computing is sleeping
  here: more processes than cores would otherwise measure the machine. Some runs without such a rank show how often
  somebody is named then.
* The time of calls by a stopwatch around them, against the sum of exposed, hidden and waiting time.

``python -m benchmarks.watching``

Results: noting a call takes 0.8 us, and ``metrics()`` 25 us. A record makes steps 0.4 % longer, from -0.5 to 2.0 %, and
takes 30 KB for each rank. In 20 of 20 runs of 150 steps, ``metrics()`` and ``bagua timeline`` named a rank that took
22 ms for 20 ms of work, and nobody without a late rank. With more work than cores, ``metrics()`` named the late one in
17 and 19 of 20 runs on shared memory, and somebody in 3 of 5 runs on Gloo.
"""

import argparse
import gc
import sys
import tempfile
import time
import timeit
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import bagua.torch_api as bagua
from bagua.advise import TorchWatch
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import Call, CallRecord, Place
from bagua.comm.records.recorder import Statistics
from bagua.observe import timeline
from benchmarks.paired import Comparison, Rounds, add_arguments, compare, conclude, joined, measure, slowest
from benchmarks.training_step import make_step, multilayer_perceptron

TIMEOUT_S = 60.0
#: What is promised of a step, and of the memory.
COST_LIMIT = 1.01
MEMORY_LIMIT_BYTES = 2e6
BATCH, WIDTH, HIDDEN = 16, 1024, 2048
#: Computing of a step, and by how much one rank takes longer.
COMPUTE_S, LATER = 0.02, 0.1
STARTS = 5


#: Stands for each call where none is noted.
NOTHING = CallRecord(Call("barrier", torch.uint8), Place("", "", 0, (0,)), 0, 0.0)


def begin_nothing(_: Statistics, call: Call, now: float) -> CallRecord:
    """What ``Statistics.begin`` is where no call is noted."""
    NOTHING.call, NOTHING.begun, NOTHING.ended = call, now, 0.0
    return NOTHING


def do_nothing(*_: object) -> None:
    """What the rest of ``Statistics`` is there."""


WATCHED = (Statistics.begin, Statistics.end)
UNWATCHED = (begin_nothing, do_nothing)


def watch_with(functions: Sequence[Any]) -> None:
    """Let calls be noted like that from now on."""
    Statistics.begin, Statistics.end = functions  # type: ignore[method-assign]


def time_steps(rank: Rank, hidden: int, rounds: int, calls: int) -> Rounds:
    """Blocks of steps on this rank: A without any record, B with it and ``metrics()`` after each step."""
    rank.join("shm", TIMEOUT_S)
    step = make_step("bagua", lambda: multilayer_perceptron(hidden), WIDTH, BATCH)

    def without() -> None:
        watch_with(UNWATCHED)
        step()
        watch_with(WATCHED)

    def watched() -> None:
        watch_with(WATCHED)  # so that both do the same beside the step
        step()
        bagua.metrics()
        watch_with(WATCHED)

    timed = measure(without, watched, rounds=rounds, calls=calls, before_each=bagua.barrier)
    bagua.destroy_process_group()
    return timed


def time_torch_steps(rank: Rank, hidden: int, rounds: int, calls: int) -> Rounds:
    """Blocks of steps of torch's DDP over Gloo on this rank: A without ``bagua.watch()``, B with it."""
    rank.join("gloo", TIMEOUT_S)
    seeing = TorchWatch()
    step = make_step("DDP", lambda: multilayer_perceptron(hidden), WIDTH, BATCH)
    hooks = vars(sys.modules[torch.optim.Optimizer.__module__])["_global_optimizer_post_hooks"]  # the watch's alone
    kept = dict(hooks)

    def without() -> None:
        hooks.clear()
        step()

    def watched() -> None:
        hooks.update(kept)
        step()

    timed = measure(without, watched, rounds=rounds, calls=calls, before_each=torch.distributed.barrier)
    seeing.calls.end()
    bagua.destroy_process_group()
    return timed


def direct_cost(rank: Rank, hidden: int) -> tuple[float, float, float, float]:
    """Seconds of noting one call, of ``metrics()`` and of a step, and the calls in a step."""
    rank.join("shm", TIMEOUT_S)
    step = make_step("bagua", lambda: multilayer_perceptron(hidden), WIDTH, BATCH)
    before = bagua.metrics()["comm/calls"]
    step_s = min(timeit.repeat(step, number=1, repeat=20))
    calls = (bagua.metrics()["comm/calls"] - before) / 20
    place = Place("world", "shm", rank.rank, (0, 1))
    statistics, call = Statistics(place), Call("allreduce", torch.float32, 1000, "sum", sequence=1)

    def note() -> None:
        statistics.end(statistics.begin(call, 0.0), 1.0, 1.0, 1.0)

    note_s = min(timeit.repeat(note, number=1000, repeat=20)) / 1000
    metrics_s = min(timeit.repeat(bagua.metrics, number=100, repeat=20)) / 100
    bagua.barrier()
    bagua.destroy_process_group()
    return note_s, metrics_s, step_s, calls


def held_bytes(rank: Rank) -> int:
    """What the record of 2000 calls holds on this rank, by the files that allocate it."""
    tracemalloc.start()
    rank.join("shm", TIMEOUT_S)
    tensor = torch.ones(64)
    for _ in range(2000):
        bagua.allreduce(tensor)
        work = bagua.allreduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        bagua.metrics()
    gc.collect()
    folder = Path(bagua.__file__).parents[1]
    patterns = [
        f"{folder}/comm/records/*",
        f"{folder}/observe/*",
        f"{folder}/comm/call.py",
        f"{folder}/comm/pipeline.py",
    ]
    taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, pattern) for pattern in patterns])
    bagua.destroy_process_group()
    return sum(entry.size for entry in taken.statistics("filename"))


def run_with_a_late_rank(rank: Rank, backend: str, late: Sequence[int], steps: int, folder: str) -> list[int]:
    """Whom ``metrics()`` of this rank names, for each run; -1 for nobody."""
    named = []
    for number, latest in enumerate(late):
        with mock.patch.dict("os.environ", BAGUA_TRACE=f"{folder}/{number}"):
            rank.join(backend, TIMEOUT_S)
        tensor = torch.ones(1000)
        for _ in range(steps):
            time.sleep(COMPUTE_S * (1 + LATER * (rank.rank == latest)))
            bagua.allreduce(tensor)
        named.append(int(bagua.metrics()["comm/straggler"]))
        bagua.barrier()
        bagua.destroy_process_group()
    return named


def stopwatch(rank: Rank, backend: str, calls: int) -> tuple[float, float]:
    """Seconds of calls by a stopwatch around them, and the sum of the parts that ``metrics()`` tells."""
    rank.join(backend, TIMEOUT_S)
    tensor = torch.ones(2_500_000)  # as large as a bucket
    bagua.allreduce(tensor)

    def parts() -> float:
        found = bagua.metrics()
        return sum(found[f"comm/time_{part}"] for part in ("exposed", "hidden", "waiting"))

    measured, before = 0.0, parts()
    for _ in range(calls):
        started = time.perf_counter()
        bagua.allreduce(tensor)
        measured += time.perf_counter() - started
    told = parts() - before
    bagua.destroy_process_group()
    return measured, told


def compare_steps(options: argparse.Namespace, time_them: Callable[..., Rounds], name: str) -> Comparison:
    """The line about the cost."""
    parts = []
    for start in range(min(STARTS, options.rounds)):
        share = len(range(start, options.rounds, STARTS))
        parts.append(slowest(run_ranks(time_them, 2, (options.hidden, share, options.calls))))
    return compare(f"2 ranks, batch {BATCH}: {name}", joined(parts), COST_LIMIT)


def late_ranks(options: argparse.Namespace, backend: str, size: int) -> dict[str, str]:
    """Runs with a late rank, each in its turn, and a quarter as many without; how often the right one was named."""
    late = [number % size for number in range(options.runs)] + [-1] * -(-options.runs // 4)
    with tempfile.TemporaryDirectory() as folder:
        by_metrics = run_ranks(run_with_a_late_rank, size, (backend, late, options.steps, folder))[0]
        by_timeline = [timeline(f"{folder}/{number}")["otherData"]["straggler"] for number in range(len(late))]
    found: dict[str, str] = {}
    for kind, runs in (
        ("the late rank is named", range(options.runs)),
        ("nobody is, as nobody is late", range(options.runs, len(late))),
    ):
        shares = {
            name: f"{sum(named[run] == late[run] for run in runs)} of {len(runs)}"
            for name, named in (("metrics()", by_metrics), ("timeline", by_timeline))
        }
        found[f"{size} ranks on {backend}: {kind}"] = ", ".join(f"{name} {share}" for name, share in shares.items())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.watching",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, rounds=60)
    parser.add_argument("--hidden", type=int, default=HIDDEN, metavar="N", help="width of the hidden layers")
    parser.add_argument(
        "--calls", type=int, default=4, metavar="N", help="steps of a block, of which there are 3 a round"
    )
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="with a late rank, of each kind")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="steps of such a run")
    parser.add_argument("--sizes", type=int, nargs="+", default=(2, 3, 4), metavar="N", help="ranks of such a run")
    parser.add_argument("--backends", nargs="+", default=("shm", "gloo"), help="of such a run")
    parser.add_argument("--only", choices=("cost", "torch", "late"), help="measure that alone")
    options = parser.parse_args(arguments)
    comparisons, notes = [], {}
    if options.only in (None, "torch"):
        name = "DDP with bagua.watch() : without"
        comparisons.append(compare_steps(options, time_torch_steps, name))
    if options.only in (None, "cost"):
        comparisons.append(compare_steps(options, time_steps, "watched : without a record"))
        note_s, metrics_s, step_s, calls = run_ranks(direct_cost, 2, (options.hidden,))[0]
        notes["parts of it"] = (
            f"{calls:.1f} calls at {note_s * 1e6:.2f} us, metrics() {metrics_s * 1e6:.1f} us: "
            f"{(calls * note_s + metrics_s) / step_s:.3%} of the fastest step, {step_s * 1e3:.1f} ms"
        )
        held = max(run_ranks(held_bytes, 2))
        notes["bytes that records of one rank hold"] = f"{held} (limit {MEMORY_LIMIT_BYTES:.0f})"
    if options.only in (None, "late"):
        for backend in options.backends:
            measured, told = run_ranks(stopwatch, 2, (backend, 60))[0]
            notes[f"{backend}: exposed, hidden and waiting time : that of the calls by a stopwatch"] = (
                f"{told / measured:.4f}"
            )
            for size in options.sizes:
                notes |= late_ranks(options, backend, size)
    return conclude(comparisons, options, notes)


if __name__ == "__main__":
    sys.exit(main())
