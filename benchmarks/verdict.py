"""What ``bagua.watch()`` says of torch's DDP on links of the lab, against what is measured there.

* The part of a step that waits for the network, against the time of a step of DDP without that of a step alone.
* How many times as fast the algorithms that it names would be, against steps of these and of DDP in turn.

Needs Linux and root. ``python -m benchmarks.verdict --links 100mbit 1gbit``
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

import torch

from bagua import comm
from bagua.advise import TorchWatch
from bagua.advise.measure import Others
from bagua.advise.verdict import RankReport
from bagua.cli.lab.network import LabUnavailableError, open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.link import LinkSettings, parse_link
from benchmarks.network.experiment import show
from benchmarks.network.ranks import Place, Training
from benchmarks.network.tasks import PerceptronTask
from benchmarks.prediction import NOT_AVAILABLE, PLAIN, measure

#: A line of the verdict about an algorithm: its name, its options, and how many times as fast.
NAMED = re.compile(r"^(\w+)(?: \((.*)\))?: ([\d.]+)x", re.MULTILINE)


def watched(rank: Rank, place: Place, task: PerceptronTask, steps: int) -> tuple[RankReport, str]:
    """What this rank sees of so many steps of torch's DDP, and the verdict, on rank 0."""
    place.join(rank)
    training = Training(task, "ddp", rank.rank)
    seeing = TorchWatch()
    training.take_steps(steps)
    seen, said = seeing.seen(), seeing.end()
    torch.distributed.barrier()
    training.prepared.finish()
    comm.destroy_process_group()
    return seen, said


def named_in(said: str) -> dict[str, float]:
    """How many times as fast each contender would be."""
    found = NAMED.findall(said)
    return {name + ":" * bool(options) + options.replace(", ", ","): float(times) for name, options, times in found}


def period_of(contender: str) -> int:
    """Steps from one exchange to the next."""
    found = re.search(r"sync_every=(\d+)", contender)
    return int(found[1]) if found else 1


def rows_of(link: LinkSettings, options: argparse.Namespace) -> list[str]:
    """What was said and measured on one link."""
    task = PerceptronTask(hidden=options.hidden, outer=options.hidden // 2, batch=options.batch)
    others = Others()
    with open_network(2, link) as network:
        of_ranks = run_ranks(watched, 2, (Place(network), task, options.steps), show, network)
    (seen, said), (other, _) = of_ranks
    waiting_s, told = min(seen.waiting_s, other.waiting_s), named_in(said)
    turns = {who: options.turn * period_of(who) for who in (PLAIN, "ddp", *told)}
    measured, _ = measure(2, link, task, turns, options.rounds)
    exposed_s = measured["ddp"] - measured[PLAIN]
    share = others.share()
    rows = [
        f"{link}: step {measured['ddp'] * 1e3:.0f} ms, watched {seen.step_s * 1e3:.0f} ms; other processes {share:.0%}",
        f"  waits {waiting_s * 1e3:.0f} ms, is {exposed_s * 1e3:.0f} ms longer than alone: {waiting_s / exposed_s:.3f}",
    ]
    for who, times in told.items():
        real = measured["ddp"] / measured[who]
        rows.append(f"  {who}: expected {times:.1f}x, measured {real:.2f}x: ratio of times {real / times:.3f}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--links", type=parse_link, nargs="+", default=[parse_link("100mbit"), parse_link("1gbit")], metavar="LINK")
    add("--hidden", type=int, default=1024, metavar="N", help="width of the hidden layers; default 1024")
    add("--batch", type=int, default=64, metavar="N", help="rows of a rank's batch; default 64")
    add("--steps", type=int, default=60, metavar="N", help="steps that are watched; default 60")
    add("--turn", type=int, default=2, metavar="N", help="periods of a turn; default 2")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each; default 5")
    options = parser.parse_args(arguments)
    try:
        for link in options.links:
            print(*rows_of(link, options), sep="\n", flush=True)
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return NOT_AVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
