"""``bagua advise``: which algorithm is the fastest for a script on a network."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from bagua.advise import LEAST_STEPS, Cluster, ModelFacts, StepMeter, check_wanted, weigh
from bagua.cli.arguments import link, positive, seconds
from bagua.cli.interrupts import terminated_like_interrupted
from bagua.engine import Reducer, start_listeners
from bagua.errors import BaguaError, UnsupportedAlgorithmException
from bagua.link import parse_link

FAILED, INTERRUPTED = 1, 130
EXAMPLES = """\
  bagua advise --hosts 4 --link 50mbit,20ms train.py --epochs 1
  bagua advise --hosts 2 --ranks-per-host 4 --link 1gbit train.py

The script calls bagua as usual. It is trained without a network for --seconds, and ended then. Its time does not
depend on --link, so ask for all links that you think of.
"""


def _name(text: str) -> str:
    """A name that an algorithm may have. Which ones there are is known when the script has registered its own."""
    if text.endswith(".py"):
        raise argparse.ArgumentTypeError(f"{text} is a script: put -- before it, to end the names of algorithms")
    return text


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="bagua advise",
        description="Predict how long a step of a script takes with each algorithm, on hosts with links of any speed.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=positive, default=2, metavar="N", help="default 2")
    add("--ranks-per-host", type=positive, default=1, metavar="N", help="default 1")
    add("--link", type=link, default=parse_link("1gbit"), metavar="RATE[,DELAY][,LOSS%]", help="default 1gbit")
    add("--seconds", type=seconds, default=15.0, metavar="S", help="how long the script is trained; default 15")
    add("--algorithms", nargs="+", type=_name, metavar="NAME", help="default: all; end them with --")
    add("-m", dest="module", action="store_true", help="the script is a module")
    add("script", help="a Python script that calls bagua")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the script, predict, and say what to take.

    Args:
        arguments: words that follow ``bagua advise`` on the command line.

    Returns:
        0; 1 where nothing could be measured; 130 after Ctrl-C or SIGTERM.
    """
    options = make_parser().parse_args(arguments)
    before = threading.enumerate()
    status = _advise(options)
    if any(not thread.daemon for thread in threading.enumerate() if thread not in before):
        sys.stdout.flush()
        os._exit(status)  # A thread of the script may never end.
    return status


def _advise(options: argparse.Namespace) -> int:
    try:
        with terminated_like_interrupted():
            cluster = Cluster(options.hosts, options.ranks_per_host, options.link)
            check_wanted(cluster)
            _tell(f"training {options.script} for {options.seconds:g} s")
            facts = measure_script(options, cluster)
            _tell(f"measured {len(facts.steps_s)} steps of {facts.step_s * 1e3:.1f} ms")
            advice = weigh(facts, cluster, options.algorithms, tell=_tell)
        print(advice.table())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BaguaError as error:
        print(f"bagua advise: {error}", file=sys.stderr)
        return FAILED
    return 0


def _tell(text: str) -> None:
    """Say what goes on, apart from the answer."""
    print(text, file=sys.stderr, flush=True)


def measure_script(options: argparse.Namespace, cluster: Cluster) -> ModelFacts:
    """Train the script alone for a while, with one thread, as ranks that share a host do."""
    meters: list[StepMeter] = []  # at most one: the first model is the one that is measured
    problem = (
        "the script never gave a model to bagua, so there is nothing to measure: call model.with_bagua(...) "
        "in it, or call bagua.torch_api.advise(model, optimizer, step) from Python"
    )

    def started(reducer: Reducer) -> None:
        nonlocal problem
        if meters or not reducer.optimizers:
            return
        try:
            check_wanted(cluster, options.algorithms)
        except UnsupportedAlgorithmException as error:
            problem = f"{error} An algorithm of your own must be registered before the model is wrapped."
            raise SystemExit(0) from None
        meters.append(StepMeter(reducer.module, reducer.optimizers[0]))
        until = time.monotonic() + options.seconds
        reducer.optimizers[0].register_step_post_hook(lambda *_: stepped(until))

    def stepped(until: float) -> None:
        if meters[0].steps >= LEAST_STEPS and time.monotonic() >= until:
            raise SystemExit(0)

    start_listeners.append(started)
    try:
        status = _run(options)
    finally:
        start_listeners.remove(started)
    steps = meters[0].steps if meters else 0
    if status and steps < LEAST_STEPS:
        problem = f"the script ended with exit status {status} before {LEAST_STEPS} steps were measured"
    elif meters:
        problem = f"the script made {steps} steps after the first ones; at least {LEAST_STEPS} are needed"
    if steps < LEAST_STEPS:
        raise BaguaError(problem)
    meters[0].end()
    return meters[0].facts()


def _run(options: argparse.Namespace) -> object:
    """Run the script until it ends, and say with which exit status."""
    before = list(sys.argv), list(sys.path)
    torch.set_num_threads(1)
    sys.argv = [options.script, *(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments)]
    try:
        if options.module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(options.script).resolve().parent)
            runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception as error:  # noqa: BLE001 - whatever a script raises
        traceback.print_exc()
        problem = f"the script failed: {type(error).__name__}: {error}"
        if "CUDA" in str(error) or "NVIDIA" in str(error):
            problem += ". It needs a GPU, and advise measures on the CPU of this machine: give it an option for the CPU"
        raise BaguaError(problem) from None
    finally:
        sys.argv, sys.path = before
    return 0
