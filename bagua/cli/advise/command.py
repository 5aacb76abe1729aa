"""The command line of ``bagua advise``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua import env
from bagua.advise import (
    DDP,
    CallFacts,
    Cluster,
    MachineFacts,
    Others,
    call_facts,
    link_facts,
    machine_facts,
    predict,
    probe_machine,
    weigh,
)
from bagua.checks import install_command
from bagua.cli.advise.worker import Found
from bagua.cli.arguments import link, positive, seconds
from bagua.cli.interrupts import end, signals_deferred, terminated_like_interrupted, undisturbed
from bagua.cli.lab.network import LabUnavailableError, burst_bytes, open_network
from bagua.cli.launch import Rank, run_ranks
from bagua.comm import destroy_process_group, get_default_group
from bagua.errors import how_it_ended
from bagua.link import LinkSettings, hosts_in_words, parse_link

_TIMEOUT_S = 120.0


def lab_cluster(hosts: int, ranks_per_host: int, link: LinkSettings, calls: tuple[CallFacts, ...] = ()) -> Cluster:
    """Hosts of the lab.

    Args:
        hosts: how many.
        ranks_per_host: on each.
        link: link of each host.
        calls: times of calls between them, as ``probe_link`` returned them.
    """
    rates = [rate for rate in (link.send_mbit_s, link.receive_mbit_s) if rate is not None]
    # The switch that makes delays paces what a host receives, with no bucket.
    burst = burst_bytes(min(rates)) if rates and not link.needs_switch else 0
    return Cluster(hosts, ranks_per_host, link, shared=True, burst_bytes=burst, calls=calls)


def probe_lab(hosts: int) -> MachineFacts:
    """Measure what calls cost among hosts of the lab whose links have no limit, and of which each has one rank.

    Args:
        hosts: how many.

    Raises:
        LabUnavailableError: there cannot be a lab here.
    """
    others = Others()
    with open_network(hosts) as network:
        found: list[tuple[tuple[CallFacts, ...], float]] = run_ranks(_on_machine, hosts, network=network)
    return replace(machine_facts(*found[0], ranks=hosts), others=others.share())


def probe_link(hosts: int, link: LinkSettings) -> tuple[CallFacts, ...]:
    """Measure what calls take among hosts of the lab, of which each has one rank.

    Args:
        hosts: how many.
        link: link of each host.

    Raises:
        LabUnavailableError: there cannot be a lab here.
    """
    with open_network(hosts, link) as network:
        if network.shortcoming:
            logging.getLogger("bagua").warning("calls are measured where %s", network.shortcoming)
        found: list[tuple[CallFacts, ...]] = run_ranks(_on_link, hosts, (link,), network=network)
    return found[0]


def _on_machine(rank: Rank) -> tuple[tuple[CallFacts, ...], float]:
    rank.join("gloo", _TIMEOUT_S)
    try:
        return call_facts(get_default_group().global_communicator, time.process_time)
    finally:
        destroy_process_group()


def _on_link(rank: Rank, link: LinkSettings) -> tuple[CallFacts, ...]:
    rank.join("gloo", _TIMEOUT_S)
    try:
        return link_facts(get_default_group(), lab_cluster(rank.world_size, 1, link))
    finally:
        destroy_process_group()


if TYPE_CHECKING:
    from bagua.cli.advise.worker import Found

_RATES_MBIT_S = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)
_MOST_LINES = 8


def draw(found: Found, cluster: Cluster, machine: MachineFacts, path: Path) -> bool:
    """Draw DDP and the algorithms that are the fastest at some rate.

    Args:
        found: results of measuring and rehearsing.
        cluster: hosts and links.
        machine: facts that were measured without a network.
        path: file; its ending says which kind.

    Returns:
        False where matplotlib is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError:
        return False
    assert found.facts is not None
    lines: dict[str, list[float]] = {one.name: [] for one in found.rehearsals}
    for rate in _RATES_MBIT_S:
        link = dataclasses.replace(cluster.link, send_mbit_s=rate, receive_mbit_s=rate)
        there = dataclasses.replace(cluster, link=link, calls=())
        for one in found.rehearsals:
            lines[one.name].append(predict(one, found.facts, there, machine).step_s)
    figure = matplotlib.figure.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in sorted(lines, key=lambda name: min(s / d for s, d in zip(lines[name], lines[DDP], strict=True)))[
        :_MOST_LINES
    ]:
        axes.plot(_RATES_MBIT_S, lines[name], label=name, marker=".")
    if DDP not in [line.get_label() for line in axes.get_lines()]:
        axes.plot(_RATES_MBIT_S, lines[DDP], label=DDP, color="black")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rate of each host's link, Mbit/s")
    axes.set_ylabel("seconds for a step, predicted")
    axes.set_title(f"{hosts_in_words(cluster.hosts, cluster.ranks_per_host)}, delay {cluster.link.delay_ms:g} ms")
    axes.legend()
    figure.savefig(path)
    return True


NOT_MEASURED = NOT_WRITTEN = 1
INTERRUPTED = 130
_WORKER = "import sys; from bagua.cli.advise.worker import main; main(sys.argv[1:])"
_STOP_S = 5.0
_POLL_S = 0.1
EXAMPLES = """\
  bagua advise --hosts 4 --link 50mbit,20ms train.py --epochs 1
  bagua advise --hosts 2 --ranks-per-host 4 --link 1gbit --plot advice.png train.py
  bagua advise --in-lab --hosts 2 --link 100mbit train.py     as "bagua lab" with the same options measures it

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
    add("--may-differ", action="store_true", help="save one with which ranks hold different weights between exchanges")
    add("--in-lab", action="store_true", help="all hosts share this machine, as those of bagua lab do")
    add("--out", type=Path, default=Path("bagua_advice.json"), metavar="FILE", help='for Algorithm.init("auto")')
    add("--plot", type=Path, metavar="FILE", help="draw step time against the rate of links; needs matplotlib")
    add("-m", dest="module", action="store_true", help="the script is a module")
    add("script", help="a Python script that calls bagua")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the script, predict, and say what to take.

    Args:
        arguments: words that follow ``bagua advise`` on the command line.

    Returns:
        0; 1 where nothing could be measured, or a file not written; 130 after Ctrl-C or SIGTERM.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    for path in (options.out, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
        if path is not None and path.is_dir():
            parser.error(f"{path} is a folder; name a file")
    if options.hosts * options.ranks_per_host < 2:
        print("one rank sends nothing: --hosts, or --ranks-per-host, must be 2 or more", file=sys.stderr)
        return NOT_MEASURED
    try:
        with terminated_like_interrupted():
            found = _measured(options)
            if found.facts is None or found.problem:
                print(f"bagua advise: {found.problem}", file=sys.stderr)
                return NOT_MEASURED
            cluster, machine = _place(options)
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return INTERRUPTED
    advice = weigh(found.rehearsals, found.refusals, found.facts, cluster, machine)
    print(advice.table())
    try:
        advice.save(options.out, may_differ=options.may_differ)
        print(f'written: {options.out}, which Algorithm.init("auto") reads')
        if options.plot is not None:
            drawn = draw(found, cluster, machine, options.plot)
            print(f"plot: {options.plot}" if drawn else f"plot: not drawn; {install_command('plot')} adds it")
    except (OSError, ValueError) as error:  # A file that cannot be written, or a kind of picture that there is not.
        print(f"bagua advise: {error}", file=sys.stderr)
        return NOT_WRITTEN
    return 0


def _place(options: argparse.Namespace) -> tuple[Cluster, MachineFacts]:
    """Where the script is to run, and what calls cost there."""
    if not options.in_lab:
        return Cluster(options.hosts, options.ranks_per_host, options.link), probe_machine()
    place = options.hosts, options.ranks_per_host, options.link
    try:
        calls = probe_link(options.hosts, options.link) if options.hosts > 1 else ()
        return lab_cluster(*place, calls), probe_lab(max(options.hosts, 2))
    except LabUnavailableError as error:
        print(f"bagua advise: calls are measured without the lab's links, which cost more: {error}", file=sys.stderr)
        return lab_cluster(*place), probe_machine()


def _measured(options: argparse.Namespace) -> Found:
    """What the first of as many processes as share a host, all of them at work at the same time, has found."""
    copies = options.ranks_per_host * (options.hosts if options.in_lab else 1)
    script = [options.script, *(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments)]
    with tempfile.TemporaryDirectory(prefix="bagua-advise-") as folder:
        processes: list[subprocess.Popen[bytes]] = []
        files = [Path(folder) / str(number) for number in range(copies)]
        try:
            for number, file in enumerate(files):
                with signals_deferred():
                    processes.append(_start(options, script, file, copies, silent=number > 0))
            _wait_for(processes[0], files[0])
        finally:
            undisturbed(lambda: end(processes, _STOP_S))
        if not files[0].exists():
            return Found(f"the script's process {how_it_ended(processes[0].returncode)}")
        found: Found = pickle.loads(files[0].read_bytes())  # noqa: S301 - written by our own process
        return found


def _start(
    options: argparse.Namespace, script: Sequence[str], file: Path, copies: int, *, silent: bool
) -> subprocess.Popen[bytes]:
    settings: dict[str, Any] = {
        "file": str(file),
        "seconds": options.seconds,
        "module": options.module,
        "hosts": options.hosts,
        "ranks_per_host": options.ranks_per_host,
        "algorithms": options.algorithms,
        "copies": copies,
    }
    return subprocess.Popen(
        [sys.executable, "-c", _WORKER, json.dumps(settings), *script],
        env=env.for_child({}, {"OMP_NUM_THREADS": "1"}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if silent else None,
        stderr=subprocess.DEVNULL if silent else None,
    )


def _wait_for(process: subprocess.Popen[bytes], file: Path) -> None:
    """Wait until ``file`` is there and the process has had time to end: threads of the script may keep it forever."""
    while process.poll() is None and not file.exists():
        time.sleep(_POLL_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
