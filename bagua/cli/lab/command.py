"""The command line of ``bagua lab``."""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from bagua import env
from bagua.cli.arguments import link, positive
from bagua.cli.interrupts import end, held_back, signals_deferred, terminated_like_interrupted
from bagua.cli.lab.network import INTERFACE, Host, LabUnavailableError, Network, inside, open_network, sent_bytes
from bagua.cli.lab.switch import SwitchReport
from bagua.link import LinkSettings, hosts_in_words

NOT_AVAILABLE = 3
#: After one rank has failed the others have so long to notice and to say so.
GRACE_S = 10.0
STOP_S = 5.0
_POLL_S = 0.05
EXAMPLES = """\
  bagua lab --hosts 4 --link 50mbit,20ms -- train.py --epochs 1     four hosts with one rank each
  bagua lab --hosts 2 --ranks-per-host 2 --link 1gbit -- train.py   two hosts with two ranks each
  bagua lab --link 50mbit/10mbit,20ms,0.1% -- train.py              receives 50, sends 10, loses one packet in 1,000
"""


def make_parser() -> argparse.ArgumentParser:
    """All options of the command."""
    parser = argparse.ArgumentParser(
        prog="bagua lab",
        description="Run a script on hosts with slow links, all of them on this machine. Needs Linux and root.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--hosts", type=positive, default=2, metavar="N", help="default 2")
    add("--ranks-per-host", type=positive, default=1, metavar="N", help="default 1")
    about = (
        "of each host: what it receives and sends, the delay to another host one way, and the packets that are "
        "lost between two hosts; default unlimited"
    )
    add("--link", type=link, default=LinkSettings(), metavar="RATE[/RATE][,DELAY][,LOSS%]", help=about)
    add("-m", dest="module", action="store_true", help="the script is a module")
    add("script", help="a Python script")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the hosts, run the script on them, and say what their links carried.

    Args:
        arguments: words that follow ``bagua lab`` on the command line.

    Returns:
        0; the exit status of the rank that failed first; 3 where there cannot be a lab. Nothing is left behind in any
        case.

    Raises:
        KeyboardInterrupt: after Ctrl-C, or SIGTERM.
    """
    options = make_parser().parse_args(arguments)
    script = [options.script, *(options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments)]
    command = [sys.executable, *(["-m"] if options.module else []), *script]
    reports: list[SwitchReport] = []
    started = time.monotonic()
    try:
        with terminated_like_interrupted(), open_network(options.hosts, options.link, reports.append) as network:
            status = Ranks(network, options.ranks_per_host, command).run()
            sent = [_sent_by(host) for host in network.hosts]
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return NOT_AVAILABLE
    print(summary(options, sent, time.monotonic() - started, reports, network.shortcoming), file=sys.stderr)
    return status


def _sent_by(host: Host) -> int:
    with inside(host.namespace):
        return sent_bytes()


def summary(
    options: argparse.Namespace,
    sent: Sequence[int],
    seconds: float,
    reports: Sequence[SwitchReport],
    shortcoming: str = "",
) -> str:
    """What the hosts sent, and whether the lab is what it should be, and could keep up."""
    lines = [
        f"{hosts_in_words(options.hosts, options.ranks_per_host)}, links of {options.link}: {seconds:.1f} s",
        "sent, headers included: " + ", ".join(f"host {n} {count / 1e6:.2f} MB" for n, count in enumerate(sent)),
    ]
    for report in reports:
        dropped = f"{report.lost} lost, {report.overflowed} dropped by full queues"
        lines += [f"packets: {report.frames} carried, {dropped}"]
        lines += [f"warning: {report.warning}"] if report.warning else []
    return "\n".join([*lines, f"warning: {shortcoming}"] if shortcoming else lines)


class Ranks:
    """A script on all hosts, its output with the rank before each line.

    Args:
        network: the hosts.
        per_host: ranks on each.
        command: starts the script.
    """

    def __init__(self, network: Network, per_host: int, command: Sequence[str]) -> None:
        self._network = network
        self._per_host = per_host
        self._command = list(command)
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._writing = threading.Lock()

    def run(self) -> int:
        """Start all ranks, and wait for them; the exit status of the first that failed, or 0."""
        try:
            port = _free_port(self._network.hosts[0])
            for host in self._network.hosts:
                for local_rank in range(self._per_host):
                    self._start(host, local_rank, port)
            return self._wait()
        finally:
            with held_back(signal.SIGINT, signal.SIGTERM):  # Another Ctrl-C waits until all have ended.
                self._stop()

    def _start(self, host: Host, local_rank: int, port: int) -> None:
        rank = host.number * self._per_host + local_rank
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._network.hosts) * self._per_host),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self._per_host),
            "GROUP_RANK": str(host.number),
            "MASTER_ADDR": self._network.hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "PYTHONUNBUFFERED": "1",
        }
        # Without the second, torch warns that the hosts have no names.
        defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with signals_deferred():
            with inside(host.namespace):
                process = subprocess.Popen(
                    self._command,
                    env=env.for_child(variables, defaults),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
            self._processes.append(process)
            name = f"[host {host.number}, rank {rank}]"
            # What a rank has left behind may keep its output open; nobody waits for that.
            reader = threading.Thread(target=self._pass_on, args=(process.stdout, name), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _pass_on(self, output: IO[str], name: str) -> None:
        with output:
            for line in output:
                with self._writing:
                    print(name, line, end="" if line.endswith("\n") else "\n", flush=True)

    def _wait(self) -> int:
        failed, until = 0, float("inf")
        while True:
            statuses = [process.poll() for process in self._processes]
            failed = failed or next((status for status in statuses if status), 0)
            if None not in statuses or time.monotonic() > until:
                return 128 - failed if failed < 0 else failed
            if failed and until == float("inf"):
                until = time.monotonic() + GRACE_S
            time.sleep(_POLL_S)

    def _stop(self) -> None:
        end(self._processes, STOP_S)
        for reader in self._readers:
            reader.join(STOP_S)


def _free_port(host: Host) -> int:
    with inside(host.namespace), socket.socket() as probe:
        probe.bind((host.address, 0))
        port: int = probe.getsockname()[1]
        return port
