"""Break a training command by a seeded schedule of kills, stops and partitions, and say what became of its steps.

``python -m benchmarks.chaos --members 4 --mix kill:28,stop:8 --minutes 5 --seed 1 -- python islands.py`` starts the
command once for each member, with a store for ``bagua.join_islands()`` in ``BAGUA_ISLANDS``. The schedule begins when
all members make progress; a member that fails is started again. A line with ``step=12`` or ``"step": 12`` is progress,
and ``digest=...`` on it names what all members share after this step. ``{member}`` in the command is the number of the
member. For partitions, which need root, each member lives on a host of the lab.

The exit status is 1 if all members were silent for 60 s, if digests differ, or if a member ended before its first step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from bagua.cli.interrupts import terminated_like_interrupted
from bagua.cli.lab.network import INTERFACE, Network, inside, open_network
from bagua.comm import serve_store_at
from bagua.errors import how_it_ended

KINDS = ("kill", "stop", "partition")
POLL_S, RESTART_S, WARM_UP_S, HANG_S = 0.02, 1.0, 240.0, 60.0
#: No fault comes in the last tenth of a run, or its last 20 s: there would be no time to see the recovery.
LAST_PART, LAST_S = 0.1, 20.0
#: Each process that a member starts inherits it, in whatever session it runs.
MARK = "CHAOS_MEMBER"
STEP = re.compile(r"\bstep[\"']?\s*[=:]?\s*(\d+)")
DIGEST = re.compile(r"\bdigest[\"']?\s*[=:]\s*[\"']?(\w+)")


class Fault(NamedTuple):
    """One fault; it hits the first of ``members`` that is well. A kill does not last."""

    at_s: float
    kind: str
    members: list[int]
    lasting_s: float


def draw_schedule(
    seed: int, members: int, duration_s: float, count: int, mix: Mapping[str, float], lasting_s: Sequence[float]
) -> list[Fault]:
    """``count`` faults of a run, in order; the same ones for the same seed."""
    draw = random.Random(seed)
    end_s = duration_s - min(LAST_PART * duration_s, LAST_S)
    faults = []
    for at_s in sorted(draw.uniform(0.0, end_s) for _ in range(count)):
        (kind,) = draw.choices(list(mix), list(mix.values()))
        order, lasting = draw.sample(range(members), members), draw.uniform(*lasting_s)
        faults.append(Fault(at_s, kind, order, 0.0 if kind == "kill" else lasting))
    return faults


class Said(NamedTuple):
    """A line that tells a step."""

    at_s: float
    step: int
    digest: str


def said_in(lines: Sequence[tuple[float, str]]) -> list[Said]:
    """What lines tell; words that repeat a step are none."""
    found: list[Said] = []
    for at_s, line in lines:
        step, digest = STEP.search(line), DIGEST.search(line)
        if step is not None and not (found and found[-1].step == int(step[1])):
            found.append(Said(at_s, int(step[1]), "" if digest is None else digest[1]))
    return found


class Member:
    """A command that can be started again, with all processes that it starts.

    Args:
        command: its words.
        variables: variables that it gets beside those of this process.
        namespace: path of its network namespace; empty for that of this process.

    Attributes:
        lives: lines that each of its lives has printed, and when they came.
    """

    process: subprocess.Popen[str]

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], namespace: str = "") -> None:
        self.lives: list[list[tuple[float, str]]] = []
        self._command, self._namespace, self._mark = command, namespace, uuid.uuid4().hex
        self._variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables, MARK: self._mark}

    def start(self) -> None:
        """Start it, also again; what was left of its last life ends."""
        self.end()
        with inside(self._namespace) if self._namespace else contextlib.nullcontext():
            self.process = subprocess.Popen(
                self._command, env=self._variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            )
        assert self.process.stdout is not None
        self.lives.append([])
        threading.Thread(target=self._listen, args=(self.process.stdout, self.lives[-1]), daemon=True).start()

    @staticmethod
    def _listen(output: IO[str], lines: list[tuple[float, str]]) -> None:
        with output:
            lines.extend((time.monotonic(), line) for line in output)

    def said(self) -> list[Said]:
        """What its present life has said."""
        return said_in(self.lives[-1])

    def processes(self) -> list[int]:
        """All that it has started, also those whose parents are gone."""
        wanted, found = f"{MARK}={self._mark}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # It has ended, or belongs to somebody else.
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all its processes, also to those that start meanwhile."""
        reached: set[int] = set()
        while new := set(self.processes()) - reached:
            for process in sorted(new):  # launchers first
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            reached |= new

    def end(self) -> None:
        """Kill it."""
        self.send(signal.SIGKILL)
        if self.lives:
            self.process.wait()
            wait_for(lambda: not self.processes())


def wait_for(condition: Callable[[], object], limit_s: float = WARM_UP_S) -> None:
    """Wait until it holds."""
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"the members did not come so far in {limit_s:.0f} s")
        time.sleep(POLL_S)


@dataclass
class Strike:
    """A fault that happened, from ``at_s`` to ``over_s``."""

    kind: str
    member: int
    at_s: float
    over_s: float


class Chaos:
    """One run of members under a schedule.

    Args:
        members: members, none of them started.
        faults: the schedule; times count from when all members have told a step.
        network: network of their hosts, for partitions.
    """

    def __init__(self, members: Sequence[Member], faults: Sequence[Fault], network: Network | None = None) -> None:
        self.strikes: list[Strike] = []
        self.wrong: list[str] = []  # in words
        self.begun_s = 0.0
        self._members, self._to_come, self._network = members, list(faults), network
        self._open: list[Strike] = []
        self._restarts: dict[int, float] = {}

    def run(self, duration_s: float) -> None:
        """Run for so many seconds after all members have begun, and end them."""
        try:
            for member in self._members:
                member.start()
            wait_for(lambda: all(one.said() or one.process.poll() is not None for one in self._members))
            statuses = [one.process.poll() for one in self._members if not one.said()]
            self.wrong = [f"a member {how_it_ended(status)} before its first step" for status in statuses]
            self.begun_s = time.monotonic()
            while not self.wrong and (now := time.monotonic()) < self.begun_s + duration_s:
                self._step(now)
                time.sleep(POLL_S)
        finally:
            for member in self._members:
                member.end()

    def _step(self, now: float) -> None:
        """Do what is due."""
        for number, member in enumerate(self._members):
            if member.process.poll() and now >= self._restarts.setdefault(number, now + RESTART_S):
                del self._restarts[number]
                member.start()
        for strike in [one for one in self._open if now >= one.over_s]:
            self._open.remove(strike)
            self._lift(strike)
        while self._to_come and now >= self.begun_s + self._to_come[0].at_s:
            self._strike(self._to_come.pop(0), now)
        heard_s = max(lines[-1][0] for one in self._members for lines in one.lives if lines)
        if now > heard_s + HANG_S and any(one.process.poll() != 0 for one in self._members):
            self.wrong.append(f"all members were silent for {HANG_S:g} s")

    def _strike(self, fault: Fault, now: float) -> None:
        """Let it happen to a member that is well, unless that is the last one of several."""
        hit = {strike.member for strike in self._open}
        running = [one for one in fault.members if one not in hit and self._members[one].process.poll() is None]
        well = [one for one in running if self._members[one].said()]
        if len(well) <= (len(self._members) > 1):
            return
        self.strikes.append(Strike(fault.kind, well[0], now, now + fault.lasting_s))
        if fault.kind == "kill":
            self._members[well[0]].send(signal.SIGKILL)
            return
        self._open.append(self.strikes[-1])
        if fault.kind == "stop":
            self._members[well[0]].send(signal.SIGSTOP)
        elif self._network is not None:
            self._network.cut(well[0])

    def _lift(self, strike: Strike) -> None:
        strike.over_s = time.monotonic()
        if strike.kind == "stop":
            self._members[strike.member].send(signal.SIGCONT)
        elif self._network is not None:
            self._network.mend(strike.member)


def goodput(lives: Sequence[Sequence[Sequence[Said]]], strikes: Sequence[Strike], begun_s: float) -> dict[str, float]:
    """New steps over what all members would make undisturbed, and over what they make while no fault is upon them.

    Steps that are made again count once. Steps that die with a member are lost, and their time counts. ``lives`` has
    what each life of each member has said.
    """
    made, made_well, well_s, paces = 0, 0, 0.0, []
    for member, own in enumerate(lives):
        struck, highest = [strike for strike in strikes if strike.member == member], 0
        for before, after in (pair for life in own for pair in pairwise(life)):
            steps = max(0, after.step - max(before.step, highest))
            highest = max(highest, before.step, after.step)
            made += steps if before.at_s >= begun_s else 0
            if not any(strike.at_s <= after.at_s and before.at_s <= strike.over_s for strike in struck):
                made_well, well_s = made_well + steps, well_s + after.at_s - before.at_s
                paces.append((after.step - before.step) / (after.at_s - before.at_s))
        times = [said.at_s for life in own for said in life]
        kills = [strike.at_s for strike in struck if strike.kind == "kill"]
        well_s += sum(at_s - max(time for time in times if time <= at_s) for at_s in kills)
    pace = statistics.median(paces)
    whole_s = len(lives) * (max(said.at_s for own in lives for life in own for said in life) - begun_s)
    return {"pace": pace, "of all": made / (pace * whole_s), "while well": made_well / (pace * well_s)}


def compare_digests(said: Sequence[Said]) -> tuple[int, list[int]]:
    """How many steps have a digest, and after which not all members have the same."""
    by_step = collections.defaultdict[int, set[str]](set)
    for one in said:
        if one.digest:
            by_step[one.step].add(one.digest)
    return len(by_step), sorted(step for step, digests in by_step.items() if len(digests) > 1)


@contextlib.contextmanager
def open_places(members: int, *, hosts: bool) -> Iterator[tuple[list[dict[str, Any]], Network | None]]:
    """Variables and namespace of each member, with a store for islands; and their network, if hosts are wanted."""
    if not hosts:
        store, where = serve_store_at("127.0.0.1", 0)
        yield [{"variables": {"BAGUA_ISLANDS": where}}] * members, None
        del store
        return
    with open_network(members + 1) as network:
        *homes, beside = network.hosts
        with inside(beside.namespace):
            store, where = serve_store_at(beside.address, 0)
        variables = {"BAGUA_ISLANDS": where, "GLOO_SOCKET_IFNAME": INTERFACE, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        yield [{"variables": variables, "namespace": home.namespace} for home in homes], network
        del store


def play(
    command: Sequence[str], members: int, faults: float, mix: Mapping[str, float], minutes: float, seed: int,
    lasting: Sequence[float],
) -> bool:  # fmt: skip
    """Run a command under faults, as the options of the command line say; whether all went well."""
    count = round(faults * minutes / 60)
    schedule = draw_schedule(seed, members, 60 * minutes, count, mix, lasting)
    with open_places(members, hosts="partition" in mix) as (homes, network), terminated_like_interrupted():
        words = [[word.replace("{member}", str(one)) for word in command] for one in range(members)]
        started = [Member(own, **home) for own, home in zip(words, homes, strict=True)]
        chaos = Chaos(started, schedule, network)
        chaos.run(60 * minutes)
    lives = [[said_in(lines) for lines in member.lives] for member in started]
    kinds = ", ".join(f"{kind} {sum(one.kind == kind for one in chaos.strikes)}" for kind in mix)
    restarts = sum(len(own) - 1 for own in lives)
    print(f"seed {seed}: {members} members, {60 * minutes:g} s, faults: {kinds} of {count}, {restarts} restarts")
    if not chaos.wrong:
        found = goodput(lives, chaos.strikes, chaos.begun_s)
        shown = f"{found['of all']:.3f} of undisturbed members, {found['while well']:.3f} while they were well"
        print(f"goodput: {shown}; one member makes {found['pace']:.2f} steps/s")
    digests, different = compare_digests([said for own in lives for life in own for said in life])
    print(f"digests: after {digests} steps, {f'different after {different}' if different else 'all equal'}")
    print("".join(f"WRONG: {one}\n" for one in chaos.wrong), end="", flush=True)
    return not chaos.wrong and not different


def parse_mix(text: str) -> dict[str, float]:
    """Kinds of faults and their weights, as ``kill:28,stop:8``."""
    mix = {kind: float(weight or 1) for kind, _, weight in (word.partition(":") for word in text.split(","))}
    if set(mix) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}; expected KIND:WEIGHT,... of {', '.join(KINDS)}")
    return mix


def make_parser(about: str | None, *, faults: float, mix: str, minutes: float) -> argparse.ArgumentParser:
    """A parser of the options of ``play``, with these defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--members", type=int, default=4, help="how often the command is started")
    add("--faults", type=float, default=faults, help="in an hour, over all members")
    add("--mix", type=parse_mix, default=mix, metavar="KIND:WEIGHT,...", help=", ".join(KINDS))
    add("--minutes", type=float, default=minutes)
    add("--seed", type=int, default=1)
    add("--lasting", type=float, nargs=2, default=(5.0, 15.0), metavar="SECONDS", help="shortest and longest fault")
    return parser


def main() -> None:
    parser = make_parser(__doc__, faults=90, mix="kill:28,stop:8", minutes=5.0)
    parser.add_argument("command", nargs="+", metavar="-- COMMAND")
    raise SystemExit(not play(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
