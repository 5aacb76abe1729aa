"""What one rank does in the steps of an algorithm: messages, work between them, and when it waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Message:
    """One call of a communicator.

    Attributes:
        kind: as ``bagua.comm.Call.kind``.
        nbytes: bytes of this rank's input, or of its output where that is larger.
        ranks: ranks of the communicator.
        hosts: hosts on which they are.
    """

    kind: str
    nbytes: float
    ranks: int
    hosts: int

    @property
    def input_bytes(self) -> float:
        """Bytes of this rank's input."""
        return self.nbytes / self.ranks if self.kind in ("allgather", "gather") else self.nbytes

    @property
    def pairwise(self) -> bool:
        """Whether it waits for one other rank only."""
        return self.kind in ("send", "recv", "sendrecv")


@dataclass(frozen=True)
class Run:
    """One exchange of one bucket, from its first call to its last.

    Attributes:
        items: messages, and the seconds of work before, between and after them.
        lane: name of the background thread that runs it; empty if the thread that computes starts it.
    """

    items: tuple[Message | float, ...]
    lane: str = ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages."""
        return tuple(item for item in self.items if isinstance(item, Message))


@dataclass(frozen=True)
class Moment:
    """Something that the thread which computes does.

    Attributes:
        what: ``arrival``: gradient number ``number`` is there, in the order of a backward pass. ``stepped``: the
            optimizer has stepped, which ends the step. ``start`` and ``wait``: of run number ``number``.
        number: number of the gradient or of the run.
        periods_ago: for a run that is waited for: how many repetitions of the steps ago it started.
    """

    what: Literal["arrival", "stepped", "start", "wait"]
    number: int = 0
    periods_ago: int = 0


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in a number of steps that repeat.

    Attributes:
        name: name of the algorithm.
        steps: moments of each step, in order.
        runs: all runs.
        extra_s: seconds that the thread which computes spends on the algorithm, in each step on an average, beside the
            runs.
        keeps_equal: True if ranks hold equal weights after each step.
        needs_optimizer: name of the optimizer without which the algorithm does not work; empty if any will do.
        options: options of the algorithm, if it is not used with its defaults.
    """

    name: str
    steps: tuple[tuple[Moment, ...], ...]
    runs: tuple[Run, ...]
    extra_s: float = 0.0
    keeps_equal: bool = True
    needs_optimizer: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> float:
        """Bytes that enter calls in each step, on an average."""
        return sum(message.input_bytes for run in self.runs for message in run.messages) / max(len(self.steps), 1)

    @property
    def meeting(self) -> int:
        """How many ranks wait for each other at most."""
        found = [2 if message.pairwise else message.ranks for run in self.runs for message in run.messages]
        return max(found, default=1)

    @property
    def steps_alone(self) -> float:
        """Steps from one wait for others to the next, on an average."""
        busy = sum(any(moment.what == "wait" for moment in step) for step in self.steps)
        return len(self.steps) / busy if busy else float(len(self.steps))
