"""A training step through bagua against torch's DDP, against the bare module, and what it costs in memory.

The MLP is 1024-2048-2048-2048-1024 with ReLU, 12.6 million parameters, trained with SGD. Two processes with one compute
thread each, DDP on Gloo and the loopback device, bagua on Gloo or on the backend that ``--backend`` names. Both sides
use their default buckets (torch: 25 MB, of which the first 1 MB). "DDP on bagua" is torch's DDP, with views, on torch's
backend ``bagua``.

"Communication off" has two meanings, and both are printed: the bare module without any hooks, and bagua's engine with
an exchange that does nothing. The memory is the peak of a process's resident memory while it takes a few steps, in new
processes for each kind of training, less that of the bare module; of the two ranks the smaller, as chance only adds to
it. It includes what Gloo itself holds for its messages, so the limit is for the silent form.
Lines of their own, with ``--only``, are steps of algorithms that let ranks train alone, between their exchanges. Their
allocator keeps freed memory: a process that fetches the memory of gradients page by page takes up to a quarter longer
for a step, and whether this is A or B would be chance. Beside them stands what the outer step of one rank costs, in
copies of the weights: on one rank nothing is exchanged.

``python -m benchmarks.training_step``
"""

import argparse
import functools
import itertools
import resource
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed
from torch import nn

import bagua.torch_api as bagua
from bagua import env
from bagua.cli.launch import Rank, run_ranks
from bagua.torch_api.algorithms import Algorithm
from benchmarks.paired import (
    Comparison,
    Rounds,
    add_arguments,
    compare,
    compare_added,
    conclude,
    joined,
    measure,
    slowest,
)
from benchmarks.silent import SilentAlgorithm

TIMEOUT_S = 60.0
LIMIT = 1.05
#: On shared memory: what is promised against a baseline, for each batch.
SHM_LIMITS = {
    ("DDP, views", 16): 0.55,
    ("DDP, views", 64): 0.78,
    ("bagua, silent", 16): 1.30,
    ("bagua, silent", 64): 1.20,
}
#: Torch's DDP on the backend ``bagua`` against the same on Gloo, for each batch.
TORCH_BACKEND_LIMITS = {16: 0.75, 64: 0.85}
COMPARING = "bagua, comparing in each step"
#: A comparison takes no more than a step. So after each hundredth step, the default, it costs at most 1 %.
COMPARING_LIMIT = 2.0
#: Algorithms that let ranks train alone, by the name of their steps between two exchanges.
ALONE = {f"{name} between exchanges": name for name in ("local_sgd", "slowmo", "diloco")}
ALONE_LIMIT = 1.01
#: Steps of one sample of them: single ones differ by more than the limit.
ALONE_CALLS = 10
#: For glibc: nothing that is freed goes back to the system. Else two bare modules in one process may differ by 25 %.
KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40)}
#: Copies of the weights that an outer step may take as long as, beside its exchange.
OUTER_LIMIT = 4.0
NEVER = 10**6
MEMORY_LIMIT = 1.0
MEMORY_TOLERANCE = 0.1  # 5 MB of code and of pages that come and go
HIDDEN = 2048
OUTER = 1024
BATCHES = (64, 16)
SMALL_LAYERS = 100
MEMORY_STEPS = 5
#: Processes are started so often for the rounds of a line: how their heap happens to lie decides whether a step fetches
#: the memory of gradients page by page, and stays as it is until they end.
STARTS = 5

Step = Callable[[], object]


def multilayer_perceptron(hidden: int) -> nn.Module:
    """Four linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    widths = (OUTER, hidden, hidden, hidden, OUTER)
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def many_small_parameters() -> nn.Module:
    """A model of 200 parameters in which computing takes next to nothing."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(SMALL_LAYERS)))


def bare(module: nn.Module, _: torch.optim.Optimizer) -> nn.Module:
    """No communication at all."""
    return module


def through_ddp(module: nn.Module, _: torch.optim.Optimizer, as_view: bool = False) -> nn.Module:
    """DistributedDataParallel of torch."""
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=as_view)


def through_ddp_on_bagua(module: nn.Module, _: torch.optim.Optimizer) -> nn.Module:
    """DistributedDataParallel of torch on the backend ``bagua``."""
    group = torch.distributed.new_group(backend="bagua")
    return nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)


def through_bagua(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The engine with gradient allreduce."""
    return bagua.with_bagua(module, optimizer, "gradient_allreduce")


def through_comparing_bagua(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The same, and ranks compare weights and settings after each step, not after each hundredth."""
    return bagua.with_bagua(module, optimizer, check_every=1)


def through_silent_bagua(module: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The engine with an exchange that does nothing."""
    return bagua.with_bagua(module, optimizer, SilentAlgorithm())


def through_training_alone(module: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> nn.Module:
    """The engine with an algorithm whose next exchange is far away."""
    return bagua.with_bagua(module, optimizer, Algorithm.init(name, sync_every=NEVER))


KINDS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], nn.Module]] = {
    "bare": bare,
    "DDP": through_ddp,
    "DDP, views": functools.partial(through_ddp, as_view=True),
    "DDP on bagua": through_ddp_on_bagua,
    "bagua": through_bagua,
    "bagua, silent": through_silent_bagua,
    COMPARING: through_comparing_bagua,
    **{kind: functools.partial(through_training_alone, name=name) for kind, name in ALONE.items()},
}

PAIRS = [
    ("DDP", "bagua"),
    ("DDP, views", "bagua"),
    ("DDP, views", "DDP on bagua"),
    ("bare", "bagua"),
    ("bagua, silent", "bagua"),
    ("bare", "bagua, silent"),
    ("bagua", COMPARING),
]


def make_step(kind: str, make_model: Callable[[], nn.Module], width: int, batch: int) -> Step:
    """A function that takes one training step of a new model."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = KINDS[kind](model, optimizer)
    inputs = torch.randn(batch, width)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(3):  # the first backward only shows the order of gradients
        step()
    return step


def time_steps(
    rank: Rank, backend: str, pairs: list[tuple[str, str]], hidden: int, batches: Sequence[int], rounds: int
) -> list[Rounds]:
    """Steps of the MLP on this rank, for each batch and each pair of kinds."""
    rank.join(backend, TIMEOUT_S)
    model = functools.partial(multilayer_perceptron, hidden)
    timed = []
    for batch in batches:
        for baseline, candidate in pairs:
            steps = [make_step(kind, model, OUTER, batch) for kind in (baseline, candidate)]
            calls = ALONE_CALLS if candidate in ALONE else 1
            timed.append(measure(*steps, rounds=rounds, calls=calls, before_each=torch.distributed.barrier))
    bagua.destroy_process_group()
    return timed


def time_outer_steps(rank: Rank, backend: str, name: str, hidden: int, rounds: int) -> Rounds:
    """Copies of the weights, and what every second ``optimizer.step()`` takes longer than the one before it."""
    rank.join(backend, TIMEOUT_S)
    model = multilayer_perceptron(hidden)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    wrapped = bagua.with_bagua(model, optimizer, Algorithm.init(name, sync_every=2))
    inputs, target = torch.randn(1, OUTER), torch.empty_like(weights)

    def seconds_of_a_step() -> float:
        optimizer.zero_grad()
        wrapped(inputs).square().mean().backward()
        return seconds_of(optimizer.step)

    samples: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(1 + rounds):
        plain, outer = seconds_of_a_step(), seconds_of_a_step()
        copies = [seconds_of(lambda: target.copy_(weights)) for _ in range(2)]
        for kept, sample in zip(samples, (copies[0], outer - plain, copies[1]), strict=True):
            kept.extend([sample] if number else [])  # The first round only makes what is remembered.
    bagua.destroy_process_group()
    return Rounds(*samples)


def seconds_of(function: Callable[[], object]) -> float:
    """How long a call takes."""
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s


def time_small_parameters(rank: Rank, backend: str, pairs: list[tuple[str, str]], rounds: int) -> list[Rounds]:
    """Steps of the model with 200 small parameters on this rank, for each pair of kinds."""
    rank.join(backend, TIMEOUT_S)
    timed = []
    for baseline, candidate in pairs:
        steps = [make_step(kind, many_small_parameters, 8, 4) for kind in (baseline, candidate)]
        timed.append(measure(*steps, rounds=rounds, calls=5, before_each=torch.distributed.barrier))
    bagua.destroy_process_group()
    return timed


def peak_memory_bytes(rank: Rank, backend: str, kind: str, hidden: int) -> int:
    """The most memory that this process has held after five steps of the MLP."""
    rank.join(backend, TIMEOUT_S)
    step = make_step(kind, functools.partial(multilayer_perceptron, hidden), OUTER, BATCHES[0])
    for _ in range(MEMORY_STEPS):
        step()
    del step
    bagua.destroy_process_group()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def limit_of(backend: str, baseline: str, candidate: str, batch: int) -> float | None:
    """What is promised of ``candidate`` against ``baseline``; None where nothing is."""
    if candidate == "DDP on bagua":
        return TORCH_BACKEND_LIMITS.get(batch)
    if candidate == COMPARING:
        return COMPARING_LIMIT
    if candidate in ALONE:
        return ALONE_LIMIT
    if candidate != "bagua":
        return None
    if backend == "shm":
        return SHM_LIMITS.get((baseline, batch))
    return LIMIT if baseline.startswith("DDP") else None


def compare_steps(options: argparse.Namespace, pairs: list[tuple[str, str]]) -> list[Comparison]:
    """Lines about the MLP on two ranks."""
    lines = []
    cases = [(batch, *pair) for batch in options.batches for pair in pairs]
    for (batch, baseline, candidate), rounds in zip(cases, measure_steps(2, pairs, options), strict=True):
        name = f"2 ranks, batch {batch}: {candidate} : {baseline}"
        lines.append(compare(name, rounds, limit_of(options.backend, baseline, candidate, batch)))
    return lines


def compare_training_alone(options: argparse.Namespace) -> list[Comparison]:
    """Lines about steps between two exchanges, and about an outer step in copies of the weights."""
    with env.with_defaults(KEEPS_MEMORY):
        steps = compare_steps(options, [("bare", options.only)])
    settings = options.backend, ALONE[options.only], options.hidden, options.rounds
    outer = run_ranks(time_outer_steps, 1, settings)[0]
    return [*steps, compare(f"1 rank: outer step of {settings[1]} : copy of weights", outer, OUTER_LIMIT)]


def compare_alone(options: argparse.Namespace) -> list[Comparison]:
    """Lines about the MLP on one rank."""
    alone = measure_steps(1, [("bare", "bagua")], options)
    return [
        compare(f"1 rank, batch {batch}: bagua : bare", rounds, LIMIT)
        for batch, rounds in zip(options.batches, alone, strict=True)
    ]


def measure_steps(ranks: int, pairs: list[tuple[str, str]], options: argparse.Namespace) -> list[Rounds]:
    """Steps of the MLP for each batch and each pair of kinds, from several starts of the processes."""
    of_starts = []
    for start in range(min(STARTS, options.rounds)):
        share = len(range(start, options.rounds, STARTS))
        of_ranks = run_ranks(time_steps, ranks, (options.backend, pairs, options.hidden, options.batches, share))
        of_starts.append([slowest(rounds) for rounds in zip(*of_ranks, strict=True)])
    return [joined(parts) for parts in zip(*of_starts, strict=True)]


def compare_small_parameters(options: argparse.Namespace) -> list[Comparison]:
    """All lines about many small parameters."""
    pairs = [("bare", "bagua, silent"), ("DDP", "bagua")]
    of_ranks = run_ranks(time_small_parameters, 2, (options.backend, pairs, options.rounds))
    per_rank = [slowest(rounds) for rounds in zip(*of_ranks, strict=True)]
    return [
        compare_added("2 ranks, 200 small parameters: hooks, whole step", per_rank[0]),
        compare("2 ranks, 200 small parameters: bagua : DDP", per_rank[1]),
    ]


def extra_memory(backend: str, hidden: int) -> dict[str, object]:
    """Peak memory beyond that of the bare module, in multiples of the gradients' size."""
    gradient_bytes = sum(4 * parameter.numel() for parameter in multilayer_perceptron(hidden).parameters())
    kinds = ("bare", "DDP", "bagua", "bagua, silent")
    peaks = {kind: min(run_ranks(peak_memory_bytes, 2, (backend, kind, hidden))) for kind in kinds}
    extra = {kind: round((peaks[kind] - peaks["bare"]) / gradient_bytes, 2) for kind in kinds[1:]}
    verdict = "met" if extra["bagua, silent"] <= MEMORY_LIMIT + MEMORY_TOLERANCE else "MISSED"
    return {
        "peak memory beyond the bare module, in sizes of the gradients": extra,
        f"limit {MEMORY_LIMIT} for bagua, silent": verdict,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, rounds=20)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="rows in a batch")
    parser.add_argument("--hidden", type=int, default=HIDDEN, metavar="N", help="width of the hidden layers")
    parser.add_argument("--backend", default="gloo", help="of bagua, in all but DDP")
    parser.add_argument("--only", choices=KINDS, metavar="NAME", help="leave out all but lines of this against others")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak memory out")
    options = parser.parse_args(arguments)
    if options.only in ALONE:
        return conclude(compare_training_alone(options), options)
    if options.only is not None:
        return conclude(compare_steps(options, [pair for pair in PAIRS if pair[1] == options.only]), options)
    comparisons = [*compare_steps(options, PAIRS), *compare_alone(options), *compare_small_parameters(options)]
    return conclude(comparisons, options, {} if options.no_memory else extra_memory(options.backend, options.hidden))


if __name__ == "__main__":
    sys.exit(main())
