"""A training step of DecentralizedDataParallel against decent-dp, and against torch's DDP.

The MLP is that of ``benchmarks.training_step``: 12.6 million parameters, SGD, one compute thread for each process.

Against decent-dp 0.2.3 (``pip install decent-dp==0.2.3``; left out where it is not installed): two processes, both
with the topology ``complete`` and buckets of 25 MB; decent-dp on Gloo, bagua on Gloo and on the best there is.

Against DDP on Gloo, with gradients as views: ``--nproc`` processes (4), with the topology ``one-peer-exp``.

``python -m benchmarks.decentralized``
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed
from torch import nn

import bagua.torch_api as bagua
from bagua.cli.launch import Rank, run_ranks
from bagua.parallel.decentralized import DecentralizedDataParallel
from benchmarks.paired import Comparison, Rounds, add_arguments, compare, conclude, measure, slowest
from benchmarks.training_step import HIDDEN, OUTER, multilayer_perceptron

TIMEOUT_S = 60.0
BATCH = 16
BUCKET_MB = 25
#: What is promised against decent-dp, by backend; None is the best there is.
DECENT_LIMITS = {"gloo": 0.9, None: 0.7}
DDP_LIMIT = 0.8
WARM_UP_STEPS = 3

Step = Callable[[], object]


def sgd(named: list[tuple[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of one bucket."""
    return torch.optim.SGD([parameter for _, parameter in named], lr=1e-3)


def through_decent_dp(module: nn.Module, topology: str) -> nn.Module:
    """The package that had the idea."""
    importlib.import_module("loguru").logger.disable("decent_dp")
    peer = importlib.import_module("decent_dp.ddp").DecentralizedDataParallel
    wrapped: nn.Module = peer(module, sgd, topology=topology, bucket_size_in_mb=BUCKET_MB, _local_world_size=1)
    return wrapped


def through_bagua(module: nn.Module, topology: str) -> nn.Module:
    """Ours."""
    return DecentralizedDataParallel(module, sgd, topology=topology, bucket_size_in_mb=BUCKET_MB)


def self_stepping(wrap: Callable[[nn.Module, str], nn.Module], topology: str, hidden: int, batch: int) -> Step:
    """A step of a model that updates itself in the backward pass."""
    torch.manual_seed(0)
    model = wrap(multilayer_perceptron(hidden), topology)
    inputs = torch.randn(batch, OUTER)

    def step() -> None:
        model(inputs).square().mean().backward()

    for _ in range(WARM_UP_STEPS):
        step()
    return step


def with_ddp(hidden: int, batch: int) -> Step:
    """A step with gradients reduced by torch's DDP."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(multilayer_perceptron(hidden), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch, OUTER)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(WARM_UP_STEPS):
        step()
    return step


def time_steps(rank: Rank, backend: str | None, against: str, hidden: int, batch: int, rounds: int) -> Rounds:
    """Steps on this rank: decent-dp's or DDP's, and ours."""
    rank.join(backend, TIMEOUT_S)
    if against == "decent-dp":
        baseline = self_stepping(through_decent_dp, "complete", hidden, batch)
        candidate = self_stepping(through_bagua, "complete", hidden, batch)
    else:
        baseline = with_ddp(hidden, batch)
        candidate = self_stepping(through_bagua, "one-peer-exp", hidden, batch)
    timed = measure(baseline, candidate, rounds=rounds, before_each=torch.distributed.barrier)
    # As the last ones that have a group of torch, they may wait for a thread of Gloo, which waits for Python's lock.
    del baseline, candidate
    bagua.destroy_process_group()
    return timed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decentralized",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, rounds=20)
    parser.add_argument("--hidden", type=int, default=HIDDEN, metavar="N", help="width of the hidden layers")
    parser.add_argument("--batch", type=int, default=BATCH, metavar="N", help="rows in a batch")
    parser.add_argument("--nproc", type=int, default=4, metavar="N", help="processes in the comparison with DDP")
    parser.add_argument("--against", choices=("decent-dp", "DDP"), help="only one of the two; both by default")
    options = parser.parse_args(arguments)
    comparisons: list[Comparison] = []
    notes: dict[str, object] = {}
    if options.against != "DDP":
        if importlib.util.find_spec("decent_dp") is None:
            notes["decent-dp"] = "not installed, not compared"
        else:
            comparisons += [against(options, "decent-dp", backend, 2) for backend in DECENT_LIMITS]
    if options.against != "decent-dp":
        comparisons += [against(options, "DDP", backend, options.nproc) for backend in DECENT_LIMITS]
    return conclude(comparisons, options, notes)


def against(options: argparse.Namespace, peer: str, backend: str | None, nproc: int) -> Comparison:
    """One line of the table."""
    arguments = (backend, peer, options.hidden, options.batch, options.rounds)
    of_ranks = run_ranks(time_steps, nproc, arguments)
    limit = DDP_LIMIT if peer == "DDP" else DECENT_LIMITS[backend]
    name = f"{nproc} ranks, batch {options.batch}: bagua on {backend or 'the default'} : {peer}"
    return compare(name, slowest(of_ranks), limit)


if __name__ == "__main__":
    sys.exit(main())
