"""Members that are processes, and how one reaches all of them that a launcher has started."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bagua import env
from bagua.cli.chaos.places import FaultFunctions, Home
from bagua.cli.chaos.progress import Ended, MemberProgress, MetricFiles, ProgressReader
from bagua.cli.chaos.schedule import Fault
from bagua.cli.interrupts import signals_deferred
from bagua.cli.lab.network import inside

#: Each process that a member starts inherits it.
MARK = "CHAOS_MEMBER"
STOP_S = 5.0
_LOOKS = 20


def marked(mark: str) -> list[int]:
    """Processes that carry ``mark`` in their environment, also those whose parents are gone."""
    wanted = f"{MARK}={mark}".encode()
    numbers = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return sorted(number for number in numbers if wanted in _environment(number))


def ranks_of(processes: Sequence[int]) -> list[int]:
    """Those of ``processes`` that a launcher has made ranks, without the helpers that these have started."""
    ranks = {one for one in processes if any(word.startswith(b"LOCAL_RANK=") for word in _environment(one))}
    return [one for one in sorted(ranks) if _parent(one) not in ranks]


def _environment(process: int) -> list[bytes]:
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:  # It has ended, or belongs to somebody else.
        return []


def _parent(process: int) -> int:
    try:
        # The name of the program may contain anything, a parenthesis too.
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _send(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _send_all(mark: str, number: signal.Signals) -> int:
    """Send a signal to all processes of a member, also to those that start meanwhile; how many there were."""
    reached: set[int] = set()
    for _ in range(_LOOKS):
        new = [one for one in marked(mark) if one not in reached]
        if not new:
            break
        _send(new, number)
        reached.update(new)
    return len(reached)


def end_all(mark: str) -> None:
    """End all processes of a member: politely, then not. Stopped ones wake first."""
    if not marked(mark):
        return
    _send_all(mark, signal.SIGCONT)
    _send_all(mark, signal.SIGTERM)
    until = time.monotonic() + STOP_S
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    _send_all(mark, signal.SIGKILL)


def start_marked(
    command: Sequence[str], place: Home, mark: str, variables: Mapping[str, str], defaults: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a program whose output is read, and whose processes ``marked`` finds.

    Args:
        command: its words.
        place: place in which it lives.
        mark: mark of its processes.
        variables: variables that it gets; those of ``place`` win.
        defaults: variables that it gets where this process has none of that name.
    """
    told = {**variables, **place.variables, MARK: mark, "PYTHONUNBUFFERED": "1"}
    with inside(place.namespace) if place.namespace else contextlib.nullcontext():
        return subprocess.Popen(
            command,
            env=env.for_child(told, defaults),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


@dataclass
class _Running:
    process: subprocess.Popen[str]
    reader: threading.Thread


@dataclass
class Processes:
    """Members that are started by one command each.

    Args:
        command: words of the command; ``{member}``, ``{members}``, ``{first}`` and ``{service}`` are replaced.
        places: place of each member.
        run: name of this run, unlike that of any other.
        words: values that ``{service}`` and the like are replaced with.
        variables: variables that all members get.
        reader: finds progress in what they print.
        files: finds progress in files of metrics; None for none.
        faults: functions for each kind of fault that is not a matter of processes: begin, and end.
        hits_ranks: True if kills and stops hit one rank of a member, and not all of it.
        clock: seconds since the members were started.
        echo: told each line that a member prints, with its number.
    """

    command: Sequence[str]
    places: Sequence[Home]
    run: str
    words: Mapping[str, str]
    variables: Mapping[str, str]
    reader: ProgressReader
    files: MetricFiles | None
    faults: Mapping[str, FaultFunctions]
    hits_ranks: bool
    clock: Callable[[], float]
    echo: Callable[[int, str], object] = lambda _member, _line: None
    _running: dict[int, _Running] = field(default_factory=dict)
    _said: queue.SimpleQueue[MemberProgress] = field(default_factory=queue.SimpleQueue)

    def start(self, member: int) -> None:
        """Start a member, also again."""
        command = [self.fill_in(word, member) for word in self.command]
        place, defaults = self.places[member], {"OMP_NUM_THREADS": "1"}
        with signals_deferred():
            process = start_marked(command, place, self._mark(member), self.variables, defaults)
            reader = threading.Thread(target=self._listen, args=(member, process.stdout), daemon=True)
            reader.start()
            self._running[member] = _Running(process, reader)

    def fill_in(self, word: str, member: int) -> str:
        """``word`` of the command, as a member gets it."""
        for name, value in {**self.words, "member": str(member), "members": str(len(self.places))}.items():
            word = word.replace(f"{{{name}}}", value)
        return word

    def _mark(self, member: int) -> str:
        return f"{self.run}/{member}"

    def _listen(self, member: int, output: IO[str]) -> None:
        with output:
            for line in output:
                self.echo(member, line)
                found = self.reader.read(member, self.clock(), line)
                if found is not None:
                    self._said.put(found)

    def poll(self) -> list[Ended | MemberProgress]:
        """What has happened since the last call, in order."""
        ended = []
        for member, running in list(self._running.items()):
            status = running.process.poll()
            if status is not None:
                at_s = self.clock()
                _send_all(self._mark(member), signal.SIGKILL)  # What it leaves behind would keep its output open.
                running.reader.join(STOP_S)
                del self._running[member]
                ended.append(Ended(member, at_s, status))
        events: list[Ended | MemberProgress] = [] if self.files is None else [*self.files.read(self.clock())]
        while not self._said.empty():
            events.append(self._said.get())
        return [*events, *ended]

    def hit(self, fault: Fault, member: int) -> str:
        """Let a fault happen; what was done, in words."""
        if fault.kind in self.faults:
            return self.faults[fault.kind][0](fault, member)
        number = signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP
        done = "killed" if fault.kind == "kill" else f"stopped for {fault.lasting_s:.1f} s"
        ranks = ranks_of(marked(self._mark(member))) if self.hits_ranks else []
        if ranks:
            chosen = ranks[int(fault.draw * len(ranks))]
            _send([chosen], number)
            return f"one rank of {len(ranks)}, process {chosen}, {done}"
        count = _send_all(self._mark(member), number)
        return f"{count} process{'es' if count != 1 else ''} {done}"

    def lift(self, fault: Fault, member: int) -> None:
        """End a fault that lasts."""
        if fault.kind in self.faults:
            self.faults[fault.kind][1](fault, member)
        else:
            _send_all(self._mark(member), signal.SIGCONT)

    def close(self) -> None:
        """End all members. Idempotent."""
        for member in range(len(self.places)):
            _send_all(self._mark(member), signal.SIGCONT)
            _send_all(self._mark(member), signal.SIGTERM)
        for member in range(len(self.places)):
            end_all(self._mark(member))
        for running in self._running.values():
            running.process.wait()
            running.reader.join(STOP_S)
        self._running.clear()
